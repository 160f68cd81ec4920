"""What every kernel compiles to, as a hash for each recorded call: a refactoring must not change one.

    python tools/compiled_code.py --out before.json          in the tree before the change
    python tools/compiled_code.py --compare before.json      in the tree after it

The calls are those that `isobit check --law compile` records, on meta tensors, so no GPU is needed. A call is
its grid, the numbers and the sizes of tensors and TMA boxes it passes, and the PTX for Hopper without names,
line numbers and comments. Calls are compared as a set for each op, backend and dtype: neither the names of
kernels and files nor the order of declarations count.
"""

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch


def ptx_of(source: Any, options: dict[str, Any]) -> str:
    """PTX without what only names and lines of the source decide."""
    import triton
    from triton.backends.compiler import GPUTarget

    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = done.asm["ptx"].partition(".section")[0]
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"^\s*\.(loc|file)\b.*\n", "", text, flags=re.M)
    text = re.sub(r"\$L__(tmp|func_\w+)\d+:", "", text)  # marks for the debugger: no code jumps there
    kernel = re.search(r"\.entry\s+(\w+)", text)
    assert kernel is not None
    text = text.replace(kernel.group(1), "KERNEL")
    # These labels only mark lines of inlined functions: no instruction names them.
    text = re.sub(r"\$L__tmp\d+:", "", text)
    # Functions that are not inlined, and labels, are named after functions and lines of the source: number
    # them in the order in which they occur.
    functions = set(re.findall(r"\.func\s+(?:\([^)]*\)\s*)?(\w+)", text))
    names = functions | set(re.findall(r"\$L__\w+", text))
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        name = match.group()
        return f"NAME{numbers.setdefault(name, len(numbers))}" if name in names else name

    text = re.sub(r"[$\w]+", numbered, text)
    return re.sub(r"\s+", " ", text)


def described(value: Any) -> Any:
    if hasattr(value, "block_shape"):
        base = value.base
        return [
            "box",
            list(value.shape),
            list(value.strides),
            list(value.block_shape),
            str(base.dtype),
            repr(value.layout),
        ]
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype), list(value.shape), list(value.stride())]
    return None


def calls_of(kernels: Any, dtype: torch.dtype) -> list[str]:
    """A hash for each launch that is recorded."""
    from isobit.frame.launch import Recorder

    class WithGrids(Recorder):
        def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            grids.append(tuple(grid))
            super().__call__(kernel, grid, *args, **options)

    grids: list[tuple[int, ...]] = []
    recorder = WithGrids()
    kernels.record(recorder, dtype)
    hashes = []
    for grid, (kernel, args, options), (_, source, compile_options) in zip(
        grids, recorder.launches, recorder.sources(), strict=True
    ):
        names = kernel.arg_names
        values = dict(zip(names, args, strict=False)) | {k: v for k, v in options.items() if k in names}
        passed = [
            described(v) if (isinstance(v, torch.Tensor) or hasattr(v, "block_shape")) else repr(v)
            for name, v in ((n, values[n]) for n in names)
            if not kernel.params[names.index(name)].is_constexpr
        ]
        # An error ends the comparison: two trees in which nothing compiles would be equal.
        code = ptx_of(source, compile_options)
        text = json.dumps([grid, passed, sorted(map(str, compile_options.items())), code])
        hashes.append(hashlib.sha256(text.encode()).hexdigest()[:16])
    return hashes


def all_calls(ops: list[str]) -> dict[str, list[str]]:
    from isobit.spec.proofs import proofs

    calls = {}
    for name, proof in sorted(proofs().items()):
        if ops and name not in ops:
            continue
        for backend, kernels in proof.kernels.items():
            dtypes = sorted({c.dtype for c in proof.cases if c.dtype != torch.float64}, key=str)
            if backend == "hopper":
                dtypes = [d for d in dtypes if d.itemsize == 2]
            for dtype in dtypes[:2]:
                key = f"{name} {backend} {str(dtype).removeprefix('torch.')}"
                calls[key] = sorted(calls_of(kernels, dtype))
                print(f"{key}: {len(calls[key])} calls", flush=True)
    return calls


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the hashes to this file")
    parser.add_argument("--compare", type=Path, help="compare with the hashes in this file")
    parser.add_argument("--op", action="append", default=[], help="only this op; may be repeated")
    options = parser.parse_args()
    calls = all_calls(options.op)
    if options.out:
        options.out.write_text(json.dumps(calls, indent=1, sort_keys=True))
    if options.compare is None:
        return 0
    before = json.loads(options.compare.read_text())
    changed = 0
    for key in sorted({*calls, *(key for key in before if not options.op or key.split()[0] in options.op)}):
        lost = Counter(before.get(key, ())) - Counter(calls.get(key, ()))
        new = Counter(calls.get(key, ())) - Counter(before.get(key, ()))
        if lost or new:
            changed += 1
            print(f"CHANGED {key}: {sum(lost.values())} calls are gone, {sum(new.values())} are new")
    print(
        f"{changed} of {len(calls)} sets of calls have changed" if changed else "the compiled code is equal"
    )
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
