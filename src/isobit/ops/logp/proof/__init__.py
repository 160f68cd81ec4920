"""The proof of `logp`: inputs that would expose a wrong kernel, the truth, error scales. `shards.py` has the
class with shards of the vocabulary."""

import math
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.logits import CHUNK_ELEMENTS
from isobit.kernels.host.tokens import live_rows
from isobit.ops.logp import reference
from isobit.ops.logp.op import forward
from isobit.ops.logp.proof import shards
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, InputOptions, Kernels, Mutant, Proof

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
IGNORE, NAN = -100, float("nan")
MB = 1 << 20

# Inputs


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Inputs of a case. Masked rows hold NaN."""
    dims = dict(case.dims)
    V = dims.pop("V")
    lead = tuple(dims.values())
    N = math.prod(lead)
    gen = torch.Generator().manual_seed(options.seed)
    if case.data == "edge":
        z, ids = alter.edge_rows(N, V, gen)
    else:
        ids = torch.randint(0, V, (N,), generator=gen)
        z = torch.empty(N, V, dtype=case.dtype, device=device)
        if case.data == "random":  # drawn on the device: benchmark cases have a billion logits
            z.normal_(generator=torch.Generator(device).manual_seed(options.seed))
        else:
            z.fill_(options.constant)
    if options.token is not None:
        ids = torch.full((N,), options.token % V)
    ids = ids.to(case.options.get("ids", torch.int64))
    args: Args = {"ignore_index": IGNORE, "temperature": case.options.get("temperature", 1.0)}
    args["padded_vocab"] = case.options.get("padded")
    if case.options.get("each"):  # one temperature per row
        args["temperature"] = 0.5 + 1.5 * torch.rand(N, generator=gen)
    mask = None
    if case.options.get("mask"):
        mask = alter.mask_of(case.options["mask"], N, ids, IGNORE)
        dead = ~live_rows(ids, mask, IGNORE)
        z[dead] = NAN
        if case.options.get("each"):
            args["temperature"][dead] = NAN
    args |= {"logits": z.to(case.dtype), "token_ids": ids, "mask": mask}
    by_rows = {n: t for n, t in args.items() if isinstance(t, Tensor)}
    args |= {n: t.to(device).reshape(*lead, *t.shape[1:]) for n, t in by_rows.items()}
    return lay_out(args, case.layout)


def lay_out(args: Args, layout: str) -> Args:
    """The logits in another layout, or what has one number per row."""
    if layout == "every other":
        return alter.every_other(args)
    return alter.laid_out_some(args, ("logits",), layout)


def reorder(args: Args) -> Args:
    """Roll the vocabulary by one column: the same mathematics, another order of the sum."""
    rolled = alter.rolled_ids(args["token_ids"], args["logits"].shape[-1])
    return args | {"logits": args["logits"].roll(1, -1), "token_ids": rolled}


def padding(args: Args, rows: int) -> Args:
    """Masked rows of NaN to append; they must change nothing."""
    nan = args["logits"].new_full((rows, args["logits"].shape[-1]), NAN)
    return {"logits": nan, **alter.token_padding(args, rows, IGNORE)}


# Truth and errors


def formula(args: Args) -> tuple[Tensor, ...]:
    return reference.formula(**{name: args[name] for name in args if name != "padded_vocab"})


def scale(args: Args, outputs: Any, cotangents: Any) -> dict[str, Tensor]:
    """Largest intermediates, in fp64: rounding errors are relative to these."""
    logits, temperature = args["logits"], args["temperature"]
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    if isinstance(temperature, Tensor):
        temperature = torch.where(live, temperature, 1.0)[..., None]
    z = torch.where(live[..., None], logits, 0.0) / temperature
    top = z.amax(-1)
    logp64, entropy, lse = outputs
    log_v = math.log(logits.shape[-1]) + 4.0  # sums of V terms, and exp2/log2 with errors of some ulp
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
    if backend == "model-8x1":
        return 64 * MB + 128 * N * case.dims["V"]
    if backend == "reference":
        chunk = min(N * case.dims["V"], max(CHUNK_ELEMENTS, case.dims["V"]))
        return 8 * max(case.dtype.itemsize, 4) * chunk + 128 * N + MB
    states = 4 * 25 * N if backend == "triton-8x1" else 0
    return MB + 8 * N + states  # partial sums of few rows; the kept (m, s) of many


def _meta(N: int, V: int, dtype: torch.dtype, full: bool) -> tuple[Args, Args]:
    """Arguments of a forward and of its backward: with no optional ones, or with all."""

    def empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    args: Args = {"logits": empty(N, V, dtype=dtype), "token_ids": empty(N, dtype=torch.int64)}
    args |= {"mask": empty(N, dtype=torch.bool) if full else None, "ignore_index": IGNORE}
    args |= {"temperature": empty(N) if full else 1.0, "padded_vocab": None}
    flags = {f"return_{name}": full for name in ("entropy", "lse", "stats")}
    grads = {name: empty(N) if full else None for name in ("entropy", "dentropy", "dlse")}
    return args | flags, args | {"stats": empty(2, N), "dlogp": empty(N), **grads}


def record(launch: Any, dtype: torch.dtype) -> None:
    """Every kernel: few and many rows, odd and even V, with and without options."""
    from isobit.ops.logp import kernels_triton as kernels

    for N, V, full in ((1, 50257, False), (4096, 50257, True), (1, 151936, True), (4096, 151936, False)):
        ours, theirs = _meta(N, V, dtype, full)
        kernels.logp(launch=launch, **ours)
        kernels.logp_bwd(launch=launch, **theirs)


def record_hopper(launch: Any, dtype: torch.dtype) -> None:
    """The forward only; the backward is that of the portable kernels."""
    from isobit.ops.logp import kernels_hopper as kernels

    for full in (False, True):
        kernels.logp(launch=launch, **_meta(4096, 50257, dtype, full)[0])


def record_shards(launch: Any, dtype: torch.dtype) -> None:
    """All shards with an odd vocabulary; and a rank of four, with options and with a gradient of its own
    columns."""
    from isobit.ops.logp import kernels_triton_shards as kernels

    kernels.logp(launch=launch, **_meta(4096, 50257, dtype, False)[0])
    ours, theirs = _meta(4096, 37984, dtype, True)
    of_all = {"vocab": 151936, "padded_vocab": 151936}
    own = kernels.logp_states(launch=launch, **ours | of_all | {"shard": 2, "shards": 2})
    kernels.logp_merged(launch=launch, **ours | of_all | {"states": own.expand(4, *own.shape).clone()})
    kernels.logp_shard_bwd(launch=launch, **theirs | {"first_column": 37984, "tokens": 151936})


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
    Case({"N": 20, "V": 1030}, BF16, layout="every other", options={"mask": torch.bool, "each": True}),
    Case({"N": 20, "V": 130}, F32, options={"mask": 0.25}),
]
_HEAVY = [
    Case({"N": 65537, "V": 33}, BF16, data="random", heavy=True),
    Case({"N": 40, "V": 151936}, BF16, options={"mask": torch.bool}, heavy=True),
    Case({"N": 20, "V": 300000}, F32, heavy=True),
    Case({"N": 64, "V": 50257}, F16, options={"temperature": 0.7}, heavy=True),
]
_IGNORED = [Case({"N": 7, "V": 130}, F32, options={"mask": alter.BY_IDS})]
# V is more than one split, so that few rows use the split kernels and many (from 16 on, on a CPU) do not.
_BITS = [
    Case({"N": 17, "V": 16501}, F32),
    Case({"N": 5, "V": 16640}, BF16),
    Case({"N": 12, "V": 999}, F32, data="random", options={"temperature": 0.7}),
    Case({"N": 5, "V": 3001}, F32, data="random", options={"each": True}),
    Case({"N": 2200, "V": 50257}, F16, data="random", heavy=True),
    Case({"N": 2200, "V": 151936}, BF16, data="random", heavy=True),
    Case({"N": 1100, "V": 32768}, F32, data="random", heavy=True),
    # More than 2**31 logits: wrong 32-bit offsets would fail here.
    Case({"N": 16500, "V": 131072}, BF16, data="random", heavy=True, gpu_gb=70),
]

CONTROLS = [Control("the vocabulary rolled by one column", reorder)]

PROOF = Proof(
    op=forward,
    op_class="logprob",
    outputs=("logp", "entropy", "lse"),
    make=make,
    formula=formula,
    scale=scale,
    controls=CONTROLS,
    padding=padding,
    layouts=("shifted", "padded", "offset", "every other"),
    lay_out=lay_out,
    memory=memory,
    cases=_SMALL + _HEAVY + _IGNORED,
    bit_cases=_BITS,
    memory_cases=[
        Case({"N": 8, "V": 50257}, F32),
        Case({"N": 600, "V": 50257}, BF16, data="random", heavy=True),
    ],
    mutants=[
        Mutant("temperature 0", "temperature", lambda a: a | {"temperature": 0.0}),
        Mutant("temperature NaN", "temperature", lambda a: a | {"temperature": float("nan")}),
        Mutant("three temperatures", "temperature", lambda a: a | {"temperature": torch.ones(3)}),
        Mutant(
            "temperatures in bf16",
            "temperature",
            lambda a: a | {"temperature": torch.ones_like(a["token_ids"], dtype=BF16)},
        ),
        Mutant("float mask", "mask", lambda a: a | {"mask": torch.ones_like(a["token_ids"], dtype=F32)}),
        Mutant("V = 0", "logits", lambda a: a | {"logits": a["logits"][..., :0]}),
        Mutant("odd padding", "padded_vocab", lambda a: a | {"padded_vocab": 64 * 9000 + 1}),
        Mutant("padding without room", "padded_vocab", lambda a: a | {"padded_vocab": 0}),
    ],
    bad_value=lambda args: alter.one_bad_id(args, args["logits"].shape[-1]),
    kernels={
        "triton": Kernels(record),
        "hopper": Kernels(record_hopper, targets=(("cuda", 90, 32),)),
        "triton-8x1": Kernels(record_shards, targets=(("cuda", 90, 32),)),
    },
    positive=("V",),
    slow=("model-8x1",),
    differs=shards.differs(CONTROLS),
)

PROOFS = [PROOF]
