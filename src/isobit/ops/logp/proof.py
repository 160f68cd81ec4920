"""What must be shown of `logp`: inputs that would expose a wrong kernel, the truth, error scales."""

import math
from typing import Any

import torch
from torch import Tensor

from isobit.blocks.tokens import live_rows
from isobit.check.proof import Args, Case, Control, InputOptions, Kernels, Mutant, Proof
from isobit.ops.logp import reference
from isobit.ops.logp.op import forward, logp

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
IGNORE = -100

# Inputs


def edge_rows(N: int, V: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows that plain randn never shows, by turns: outliers in the last column, large shifts, one logit
    that dominates, ties, banned tokens (-inf), a wide spread. The chosen token sits where it hurts."""
    z = torch.randn(N, V, generator=gen)
    ids = torch.randint(0, V, (N,), generator=gen)
    last = V - 1
    for i in range(N):
        kind = i % 10
        if kind == 1:  # all the mass in the last column: a dropped tail shows
            z[i, last] = 20.0
            ids[i] = last
        elif kind == 2:  # exp overflows without max-subtraction
            z[i] += 200.0
        elif kind == 3:  # exp underflows without it
            z[i] -= 200.0
        elif kind == 4:  # one logit dominates: logp of it is a tiny number
            z[i, ids[i]] += 60.0
        elif kind == 5:  # a common shift must cost no digits
            z[i] += 1e4
        elif kind == 6:
            z[i] -= 1e4
        elif kind == 7:  # ties
            z[i] = 0.5
            ids[i] = last
        elif kind == 8:  # banned tokens
            banned = torch.rand(V, generator=gen) < 0.3
            banned[ids[i]] = False
            z[i, banned] = float("-inf")
        elif kind == 9:
            z[i] *= 30.0
    return z, ids


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Inputs of a case. In every fourth row of a masked case the row does not count and holds NaN."""
    dims = dict(case.dims)
    V = dims.pop("V")
    lead = tuple(dims.values())
    N = math.prod(lead)
    gen = torch.Generator().manual_seed(options.seed)
    if case.data == "edge":
        z, ids = edge_rows(N, V, gen)
    else:
        ids = torch.randint(0, V, (N,), generator=gen)
        z = torch.empty(N, V, dtype=case.dtype, device=device).fill_(options.constant)
        if case.data == "random":  # drawn where it will live: benchmark cases hold a billion logits
            z.normal_(generator=torch.Generator(device).manual_seed(options.seed))
    if options.token is not None:
        ids = torch.full((N,), options.token % V)
    ids = ids.to(case.options.get("ids", torch.int64))
    args: Args = {"ignore_index": IGNORE, "temperature": case.options.get("temperature", 1.0)}
    mask = None
    if case.options.get("mask"):
        index = torch.arange(N)
        mask = (index % 4 != 3).to(case.options["mask"])
        ids[index % 8 == 6] = IGNORE
        z[(index % 4 == 3) | (index % 8 == 6)] = float("nan")
    z = lay_out(z.to(case.dtype).to(device).reshape(*lead, V), case.layout)
    args |= {"logits": z, "token_ids": ids.reshape(lead).to(device)}
    args["mask"] = None if mask is None else mask.reshape(lead).to(device)
    return args


def lay_out(z: Tensor, layout: str) -> Tensor:
    """The same values under other strides and alignments; what lies between the rows is NaN."""
    if layout == "dense":
        return z
    *lead, V = z.shape
    if layout == "shifted":  # logits[:, :-1] of one token more
        wide = z.new_full((*lead[:-1], lead[-1] + 1, V), float("nan"))
        view = wide[..., :-1, :]
    elif layout == "padded":  # rows farther apart, at every alignment
        wide = z.new_full((*lead, V + 5), float("nan"))
        view = wide[..., :V]
    else:  # "offset": the tensor itself starts between two 16-byte words
        wide = z.new_full((*lead, V + 3), float("nan"))
        view = wide[..., 1 : V + 1]
    view.copy_(z)
    return view


def reorder(args: Args) -> Args:
    """Roll the vocabulary by one column: the same mathematics, another order of the sum."""
    V = args["logits"].shape[-1]
    ids = args["token_ids"]
    rolled = torch.where((ids >= 0) & (ids < V), (ids + 1) % V, ids)
    return args | {"logits": args["logits"].roll(1, -1), "token_ids": rolled}


def padding(args: Args, rows: int) -> Args:
    """Rows to append that must change nothing: NaN, and not counting."""
    V = args["logits"].shape[-1]
    ids = args["token_ids"].new_full((rows,), IGNORE)
    mask = args["mask"]
    return {
        "logits": args["logits"].new_full((rows, V), float("nan")),
        "token_ids": ids,
        "mask": None if mask is None else mask.new_zeros(rows),
    }


def bad_value(args: Args) -> tuple[Args, int]:
    """A live row with a token id one past the end."""
    ids = args["token_ids"].clone()
    row = min(1, ids.numel() - 1)
    ids.view(-1)[row] = args["logits"].shape[-1]
    return args | {"token_ids": ids}, row


# Truth and errors


def call(args: Args, backend: str | None, validate: bool | None = None) -> tuple[Tensor, ...]:
    rest = {k: v for k, v in args.items() if k not in ("logits", "token_ids")}
    flags: dict[str, Any] = {"return_entropy": True, "return_lse": True, "validate": validate}
    return logp(args["logits"], args["token_ids"], **rest, **flags, backend=backend)


def call_alone(args: Args, backend: str | None) -> tuple[Tensor, ...]:
    """Only the log-probabilities: not asking for the rest must not change their bits."""
    rest = {k: v for k, v in args.items() if k not in ("logits", "token_ids")}
    return (logp(args["logits"], args["token_ids"], **rest, backend=backend),)


def formula(args: Args) -> tuple[Tensor, ...]:
    return reference.formula(**args)


def scale(args: Args, outputs: Any, cotangents: Any) -> dict[str, Tensor]:
    """Largest intermediates, in fp64: what one rounding error is relative to."""
    logits, temperature = args["logits"], args["temperature"]
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    z = torch.where(live[..., None], logits, 0.0) / temperature
    top = z.amax(-1)
    logp64, entropy, lse = outputs
    log_v = math.log(logits.shape[-1]) + 4.0  # sums of V terms, and exp2/log2 good to some ulp
    sizes = {
        "logp": logp64.abs() + log_v,
        "entropy": entropy.abs() + 2 * log_v,
        "lse": lse.abs() + top.abs() + log_v,
    }
    if cotangents:
        g_logp, g_entropy, g_lse = (g.abs()[..., None] for g in cotangents)
        log_p = (z - lse[..., None]).clamp(min=-1000.0)
        weight = g_logp + g_lse + g_entropy * (log_p.abs() + entropy.abs()[..., None])
        fp32 = torch.finfo(torch.float32)
        p_error = log_p.exp() * (log_p.abs() + log_v) + fp32.tiny / fp32.eps  # GPUs flush subnormals to 0
        at_token = torch.zeros_like(z).scatter_(
            -1, args["token_ids"].clamp(0, z.shape[-1] - 1).long()[..., None], g_logp
        )
        sizes["gradient:logits"] = (p_error * weight + at_token) / temperature
    return sizes


# Memory and kernels


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    N = math.prod(v for k, v in case.dims.items() if k != "V")
    if backend == "reference":
        chunk = min(N * case.dims["V"], max(reference.CHUNK_ELEMENTS, case.dims["V"]))
        return 8 * 4 * chunk + 128 * N + (1 << 20)
    return (1 << 20) + 8 * N  # partial sums of few rows; the kept (m, s) of many


def record(launch: Any, dtype: torch.dtype) -> None:
    """Every kernel: few and many rows, odd and even V, with and without options."""
    from isobit.ops.logp import kernels_triton as kernels

    for N, V, full in ((1, 50257, False), (4096, 50257, True), (1, 151936, True), (4096, 151936, False)):
        z = torch.empty(N, V, dtype=dtype, device="meta")
        ids = torch.empty(N, dtype=torch.int64, device="meta")
        mask = torch.empty(N, dtype=torch.bool, device="meta") if full else None
        out, entropy, lse, _ = kernels.logp(z, ids, mask, IGNORE, 1.0, full, full, full, launch=launch)
        stats = torch.empty(2, N, device="meta")
        grads = (entropy, out, entropy, lse) if full else (None, out, None, None)
        kernels.logp_bwd(z, ids, mask, stats, *grads, IGNORE, 1.0, launch=launch)


def record_hopper(launch: Any, dtype: torch.dtype) -> None:
    """The forward; its backward is that of the portable kernels."""
    from isobit.ops.logp import kernels_hopper as kernels

    for full in (False, True):
        z = torch.empty(4096, 50257, dtype=dtype, device="meta")
        ids = torch.empty(4096, dtype=torch.int64, device="meta")
        mask = torch.empty(4096, dtype=torch.bool, device="meta") if full else None
        kernels.logp(z, ids, mask, IGNORE, 1.0, full, full, full, launch=launch)


# Cases

_SMALL = [
    Case({"N": 0, "V": 7}, F32),
    Case({"N": 20, "V": 1}, BF16),
    Case({"N": 20, "V": 257}, F32, options={"mask": torch.bool}),
    Case({"N": 20, "V": 257}, BF16, options={"temperature": 0.7}),
    Case({"N": 20, "V": 257}, F16, options={"temperature": 2.5, "ids": torch.int32}),
    Case({"B": 2, "T": 10, "V": 1000}, F32, options={"mask": torch.int64}),
    Case({"B": 2, "T": 10, "V": 1025}, BF16, layout="shifted"),
    Case({"N": 20, "V": 4099}, F32, layout="offset", options={"temperature": 0.7}),
    Case({"N": 20, "V": 4099}, F16, layout="padded", options={"mask": torch.uint8}),
    Case({"B": 2, "S": 2, "T": 5, "V": 33}, F32),
    Case({"N": 3, "V": 50257}, BF16),
    Case({"N": 20, "V": 17000}, F32, options={"mask": torch.bool}),
]
_HEAVY = [
    Case({"N": 65537, "V": 33}, BF16, data="random", heavy=True),
    Case({"N": 40, "V": 151936}, BF16, options={"mask": torch.bool}, heavy=True),
    Case({"N": 20, "V": 300000}, F32, heavy=True),
    Case({"N": 64, "V": 50257}, F16, options={"temperature": 0.7}, heavy=True),
]
# V beyond one split, so that few rows take the split kernels and many (from 16 on, on a CPU) do not.
_BITS = [
    Case({"N": 17, "V": 16501}, F32),
    Case({"N": 5, "V": 16640}, BF16),
    Case({"N": 12, "V": 999}, F32, data="random", options={"temperature": 0.7}),
    Case({"N": 2200, "V": 50257}, F16, data="random", heavy=True),
    Case({"N": 2200, "V": 151936}, BF16, data="random", heavy=True),
    Case({"N": 1100, "V": 32768}, F32, data="random", heavy=True),
    # More than 2**31 logits: 32-bit offsets would show here.
    Case({"N": 16500, "V": 131072}, BF16, data="random", heavy=True, gpu_gb=70),
]

PROOF = Proof(
    op=forward,
    op_class="logprob",
    outputs=("logp", "entropy", "lse"),
    grad_inputs=("logits",),
    make=make,
    call=call,
    call_alone=call_alone,
    formula=formula,
    scale=scale,
    controls=[Control("the vocabulary rolled by one column", reorder)],
    padding=padding,
    layouts=("shifted", "padded", "offset"),
    lay_out=lambda args, layout: args | {"logits": lay_out(args["logits"], layout)},
    memory=memory,
    cases=_SMALL + _HEAVY,
    bit_cases=_BITS,
    memory_cases=[
        Case({"N": 8, "V": 50257}, F32),
        Case({"N": 600, "V": 50257}, BF16, data="random", heavy=True),
    ],
    mutants=[
        Mutant("temperature 0", "temperature", lambda a: a | {"temperature": 0.0}),
        Mutant("temperature NaN", "temperature", lambda a: a | {"temperature": float("nan")}),
        Mutant("a tensor as temperature", "temperature", lambda a: a | {"temperature": torch.ones(3)}),
        Mutant("float mask", "mask", lambda a: a | {"mask": torch.ones_like(a["token_ids"], dtype=F32)}),
        Mutant("V = 0", "logits", lambda a: a | {"logits": a["logits"][..., :0]}),
    ],
    bad_value=bad_value,
    kernels={
        "triton": Kernels(record),
        "hopper": Kernels(record_hopper, targets=(("cuda", 90, 32),)),
    },
    positive=("V",),
)

PROOFS = [PROOF]
