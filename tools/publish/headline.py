"""The short table of speed that the README shows between `<!-- results:summary -->` and its end.

One row for each of `HEADLINES`: a call that users compare, at one of its sizes. The numbers come from the
results files: isobit's time, and the fastest other implementation of the same work. A row without a
measurement is left out, so that a page for users never says what has not been measured.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from isobit.bench.report import NEW, Report, Row
from isobit.check.stamp import why_stale
from publish.overview import OLDER

#: What is timed next to isobit and does less work: it is no alternative.
LESS_WORK = ("copy", "bare_gemm")

#: Implementations as their users know them.
NAMES = {
    "cudnn": "cuDNN", "flash": "PyTorch's flash kernel", "flex": "FlexAttention", "native": "PyTorch",
    "plain": "PyTorch", "sdpa": "PyTorch", "torch.mm": "cuBLAS", "torch.mm_nosplit": "cuBLAS",
    "fa3": "FlashAttention-3", "liger": "Liger", "cce": "CCE", "trl": "TRL", "fla": "FLA", "verl": "verl",
}  # fmt: skip


@dataclass(frozen=True)
class Headline:
    """One row: what it is, and the file, series, case and direction of its numbers."""

    what: str
    file: str
    series: str
    case: str
    direction: str


_TRAINED, _HEAD = "B=2 T=8192 S=8192 H=32 KV=8 D=128 bf16", "N=8192 D=4096 V=151936 bf16"
HEADLINES = (
    Headline("`attention`, forward", "attention", "attention", _TRAINED, "fwd"),
    Headline("`attention`, backward", "attention", "attention_bwd", _TRAINED, "bwd"),
    Headline(
        "`attention`, decoding", "attention", "attention_decode", "B=1 T=1 S=4096 H=32 KV=8 D=128 bf16",
        "fwd",
    ),
    Headline("`linear_logp`, forward", "linear_logp", "linear_logp", _HEAD, "fwd"),
    Headline(
        "`linear_policy_loss`, forward and backward", "linear_policy_loss", "linear_policy_loss", _HEAD,
        "fwd_bwd",
    ),
    Headline("`det_gemm`", "det_gemm", "det_gemm", "M=8192 K=4096 N=14336 bf16", "fwd"),
    Headline(
        "`ratio_kl`, forward and backward", "ratio_kl", "ratio_kl", "B=8 T=1024 V=151936 bf16", "fwd_bwd"
    ),
    Headline(
        "training step without drift, Llama 3 8B, 8 layers", "zero_drift", "llama-3-8b-8-layers",
        "B=4 T=4096 bf16", "fwd_bwd",
    ),
)  # fmt: skip

HEAD = ["call", "size", "isobit, ms", "best other, ms", "speedup", "isobit, MB", "other, MB"]


def headlines(results_dir: Path) -> list[list[str]]:
    """The lines of the table, the head first."""
    reports: dict[str, Report] = {}
    lines = [HEAD]
    for headline in HEADLINES:
        path = results_dir / f"{headline.file}.json"
        if headline.file not in reports and path.is_file():
            reports[headline.file] = json.loads(path.read_text())
        if headline.file in reports:
            lines += _line(headline, reports[headline.file])
    return lines


def _line(headline: Headline, report: Report) -> list[list[str]]:
    where = (headline.series, headline.case, headline.direction)
    rows = [row for row in report["rows"] if (row["op"], row["case"], row["direction"]) == where]
    ours = next((row for row in rows if row["impl"] == "isobit"), None)
    best = min(filter(_is_alternative, rows), key=lambda row: float(row["ms"]), default=None)
    if ours is None or best is None:
        return []
    age = OLDER if why_stale(report["stamp"], report["rows"]) else ""
    other = f"{best['ms']:.3g} ({NAMES.get(best['impl'], best['impl'])})"
    speedup = f"{best['ms'] / ours['ms']:.2f}x"
    memory = [_megabytes(row["extra_mb"]) for row in (ours, best)]
    return [[headline.what + age, headline.case, f"{ours['ms']:.3g}", other, speedup, *memory]]


def _is_alternative(row: Row) -> bool:
    return row["impl"].partition(":")[0] not in ("isobit", *LESS_WORK) and not row["impl"].endswith(NEW)


def _megabytes(taken: float | None) -> str:
    return "-" if taken is None else f"{taken:.1f}" if taken < 10 else f"{taken:.0f}"


def origin(results_dir: Path) -> str:
    """Where the numbers come from: GPU and versions of their files."""
    paths = (results_dir / f"{name}.json" for name in dict.fromkeys(each.file for each in HEADLINES))
    stamps = [json.loads(path.read_text())["stamp"] for path in paths if path.is_file()]

    def known(key: str) -> str:
        return " and ".join(dict.fromkeys(str(stamp[key]) for stamp in stamps))

    return f"{known('gpu')}, torch {known('torch')}, Triton {known('triton')}"
