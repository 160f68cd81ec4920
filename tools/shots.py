"""The pictures of pages in the documents: `python tools/shots.py` writes docs/img.

They are of committed results, of a kernel with a fault that is checked here, and of a small model whose drift
is measured here. Fonts are those of the machine, so the bytes are not the same everywhere; what they show is.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from chromium import Chromium, executable
from isobit.cli.html import page
from isobit.cli.html.saved import read_report

ROOT = Path(__file__).resolve().parent.parent

#: Bytes that a picture may have.
MOST = 150_000

#: Leaves out the last columns of a vocabulary that is no multiple of 16.
BROKEN = """
def logp(logits, token_ids):
    z = logits.float()
    whole = max(1, z.shape[-1] // 16 * 16)
    return z.gather(-1, token_ids.long()[..., None])[..., 0] - z[..., :whole].logsumexp(-1)
"""
CHECK = ("--op", "logp", "--candidate", "my_kernels:logp", "--law", "accuracy", "--law", "gradient",
         "--law", "repeatable", "--law", "invariant", "--device", "cpu")  # fmt: skip


#: A small Llama with random weights.
SIZES = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 500, "hidden_size": 128,
         "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
         "initializer_range": 0.06}  # fmt: skip
DRIFT = ("--random", "--dtype", "fp32", "--vs", "padding", "--tokens", "320", "--length", "64",
         "--device", "cpu")  # fmt: skip


@dataclass(frozen=True)
class Shot:
    """One picture: of which page, how wide, and how much of it."""

    page: str
    width: int
    height: int
    dark: bool = False


SHOTS = {
    "check.png": Shot("check", 1000, 700),
    "bench.png": Shot("bench", 1000, 1300),
    "broken.png": Shot("broken", 1000, 640),
    "phone.png": Shot("broken", 390, 760, dark=True),
    "drift.png": Shot("drift", 1000, 1060),
    "drift_phone.png": Shot("drift", 390, 900, dark=True),
}


def pages(folder: Path) -> dict[str, Path]:
    """The pages that pictures are taken of, written into a folder."""
    paths = {name: folder / f"{name}.html" for name in ("check", "bench", "broken", "drift")}
    results = ROOT / "results" / "h200"
    paths["check"].write_text(page([read_report(results / "check_linear_logp.json")], "isobit check"))
    paths["bench"].write_text(page([read_report(results / "logp.json")], "isobit bench"))
    (folder / "my_kernels.py").write_text(BROKEN)
    (folder / "tiny-llama").mkdir()
    (folder / "tiny-llama" / "config.json").write_text(json.dumps(SIZES))
    for name, arguments in (("broken", ("check", *CHECK)), ("drift", ("drift", "tiny-llama", *DRIFT))):
        command = [sys.executable, "-m", "isobit", *arguments, "--html", str(paths[name])]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if not paths[name].is_file():
            raise SystemExit(done.stdout + done.stderr)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of pages for the documents.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs" / "img", help="where they go")
    folder = parser.parse_args().folder
    path = executable()
    if path is None:
        raise SystemExit("there is no Chromium here: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made, Chromium(path, pictures=True) as browser:
        shown = pages(Path(made))
        for name, shot in SHOTS.items():
            tab = browser.open(shown[shot.page], shot.width, shot.dark)
            data = tab.png(shot.height)
            tab.close()
            if len(data) > MOST:
                raise SystemExit(f"{name} has {len(data):,} bytes, more than {MOST:,}: take less of the page")
            (folder / name).write_bytes(data)
            print(f"{folder / name}: {len(data):,} bytes")


if __name__ == "__main__":
    main()
