"""Calls of `linear_logp` that its tests make: inputs, the truth in fp64, and how results are compared."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isobit.ops.linear_logp import reference
from isobit.ops.linear_logp.op import linear_logp

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
OUTPUTS = ("logp", "entropy", "lse")


@dataclass
class Call:
    """A call, the gradients of its results, and which gradients are needed."""

    hidden: Tensor
    weight: Tensor
    token_ids: Tensor
    bias: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    cotangents: tuple[Tensor, ...] = ()
    wanted: tuple[str, ...] = ("hidden", "weight", "bias")

    def rows(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """The same call with something done to everything that has rows."""
        options = {k: change(v) if isinstance(v, Tensor) else v for k, v in self.options.items()}
        cotangents = tuple(change(g) for g in self.cotangents)
        return replace(
            self, hidden=change(self.hidden), token_ids=change(self.token_ids), options=options,
            cotangents=cotangents,
        )  # fmt: skip

    def with_options(self, **options: Any) -> "Call":
        return replace(self, options=self.options | options)


def evaluate(call: Call, backend: str | None) -> dict[str, Tensor]:
    """Results and gradients by name."""
    leaves = {"hidden": call.hidden, "weight": call.weight, "bias": call.bias}
    leaves = {k: v.detach().requires_grad_(k in call.wanted) for k, v in leaves.items() if v is not None}
    outputs = linear_logp(
        leaves["hidden"], leaves["weight"], call.token_ids, bias=leaves.get("bias"), return_entropy=True,
        return_lse=True, backend=backend, **call.options,
    )  # fmt: skip
    asked = [v for k, v in leaves.items() if k in call.wanted]
    grads = torch.autograd.grad(outputs, asked, call.cotangents)
    result = dict(zip(OUTPUTS, (o.detach() for o in outputs), strict=True))
    return result | dict(zip((f"d{k}" for k in leaves if k in call.wanted), grads, strict=True))


def truth(call: Call) -> dict[str, Tensor]:
    """The same from the formula, in fp64."""
    leaves = {"hidden": call.hidden, "weight": call.weight, "bias": call.bias}
    leaves = {k: v.detach().double().requires_grad_() for k, v in leaves.items() if v is not None}
    options = {k: v for k, v in call.options.items() if k not in ("workspace_bytes", "validate")}
    if isinstance(options.get("temperature"), Tensor):
        options["temperature"] = options["temperature"].double()
    outputs = reference.formula(
        leaves["hidden"], leaves["weight"], call.token_ids, bias=leaves.get("bias"), **options
    )
    grads = torch.autograd.grad(outputs, list(leaves.values()), [g.double() for g in call.cotangents])
    result = dict(zip(OUTPUTS, (o.detach() for o in outputs), strict=True))
    return result | dict(zip((f"d{k}" for k in leaves), grads, strict=True))


def make(*lead: int, D: int = 20, V: int = 33, dtype: torch.dtype = F32, bias: Any = None, seed: int = 0,
         **options: Any) -> Call:  # fmt: skip
    """Logits of unit scale. `options` may hold functions of the leading shape."""
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=F64)

    wide = F64 if dtype == F64 else F32
    ids = torch.randint(0, options.get("vocab_size", V), lead, generator=gen)
    options = {k: v(lead) if callable(v) else v for k, v in options.items()}
    return Call(
        randn(*lead, D).to(dtype), (randn(V, D) / D**0.5).to(dtype), ids,
        None if bias is None else randn(V).to(bias), options, tuple(randn(*lead).to(wide) for _ in OUTPUTS),
    )  # fmt: skip


def some(lead: tuple[int, ...]) -> Tensor:
    """A mask with zeros in it."""
    return torch.arange(math.prod(lead)).reshape(lead) % 3 != 1


def each(lead: tuple[int, ...]) -> Tensor:
    """A temperature for every row."""
    return 0.5 + torch.arange(math.prod(lead)).reshape(lead) % 5 / 4


def shifted(call: Call) -> Call:
    """Hidden states as `hidden[:, :-1]`, a view with holes."""
    view = torch.cat((call.hidden, torch.full_like(call.hidden[:, :1], NAN)), dim=1)[:, :-1]
    return replace(call, hidden=view)


def dead_rows_full_of_nan(call: Call) -> Call:
    """Rows 1, 4, ... hold NaN and are masked; row 2 has an ignored id and holds infinity."""
    hidden, ids = call.hidden.clone(), call.token_ids.clone()
    hidden[1::3], ids[2], hidden[2] = NAN, -100, INF
    weight = call.weight.clone()
    cotangents = tuple(g.clone() for g in call.cotangents)
    for g in cotangents:
        g[1::3] = NAN
    return replace(call, hidden=hidden, token_ids=ids, weight=weight, cotangents=cotangents)


def padded_vocabulary(call: Call) -> Call:
    """What padding rows of the weight hold must not matter."""
    weight, bias = call.weight.clone(), call.bias.clone()
    weight[call.options["vocab_size"] :], bias[call.options["vocab_size"] :] = NAN, INF
    return replace(call, weight=weight, bias=bias)


def banned_tokens(call: Call) -> Call:
    """A bias of -inf on the whole first tile of the vocabulary, and on every third token after it."""
    bias = call.bias.clone()
    bias[:130], bias[130::3] = -INF, -INF
    return replace(call, bias=bias, token_ids=132 + 3 * (call.token_ids % 20))


EVERYTHING = {"softcap": 3.0, "logit_scale": 1.5, "vocab_size": 30, "mask": some, "temperature": each}


def every_other_row(call: Call) -> Call:
    """Everything with rows as a view with gaps that hold values which must not be read."""

    def spaced(t: Tensor) -> Tensor:
        if t.ndim > 1:
            return t
        return torch.stack((t, torch.ones_like(t)), 1)[:, 0]

    return call.rows(spaced)


def one_token(call: Call) -> Call:
    return replace(call, token_ids=torch.tensor(3).expand(call.token_ids.shape))


CALLS: dict[str, Call] = {
    "fp32": make(7),
    "bf16": make(7, dtype=BF16),
    "fp16": make(7, dtype=F16),
    "bias": make(7, bias=F32),
    "bias in bf16": make(7, dtype=BF16, bias=BF16),
    "bias in fp32 with bf16": make(7, dtype=BF16, bias=F32),
    "temperature": make(7, temperature=0.7),
    "temperature of rows": make(7, dtype=BF16, temperature=each),
    "softcap": make(7, softcap=2.0),
    "a large softcap": make(7, softcap=30.0),
    "logit_scale": make(7, dtype=F16, logit_scale=0.3),
    "a negative logit_scale": make(7, logit_scale=-2.0),
    "logits_dtype bf16": make(7, logits_dtype=BF16, bias=F32),
    "logits_dtype fp16": make(7, dtype=BF16, logits_dtype=F16),
    "mask": dead_rows_full_of_nan(make(7, mask=some)),
    "padded vocabulary": padded_vocabulary(make(7, bias=F32, vocab_size=20)),
    "everything": make(7, dtype=BF16, bias=F32, logits_dtype=BF16, **EVERYTHING),
    "everything in fp32": dead_rows_full_of_nan(make(7, bias=F32, **EVERYTHING)),
    "V = 1": make(3, V=1),
    "D = 1": make(3, D=1, bias=F32),
    "N = 0": make(0, bias=F32),
    "no leading shape": make(),
    "three dimensions": make(2, 1, 3, mask=some, temperature=each),
    "shifted": shifted(make(2, 4, mask=some)),
    "every other row": every_other_row(make(7, mask=some, temperature=each)),
    "one token for all": one_token(make(5)),
    "several splits": make(3, D=3, V=2100, bias=F32),
    "banned tokens": banned_tokens(make(5, V=200, bias=F32)),
    "several tiles": make(70, D=70, V=70, bias=F32, mask=some),
    "several tiles in bf16": make(130, D=130, V=300, dtype=BF16, bias=BF16),
    "several segments": make(1100, D=3, V=5, mask=some, bias=F32),
    "all masked": make(3, mask=lambda lead: torch.zeros(lead, dtype=torch.bool)),
}  # fmt: skip

#: Calls whose bits are compared, next to the whole they are compared with.
PERMUTED = torch.randperm(150, generator=torch.Generator().manual_seed(5))
WHOLE = {"fp32": make(150, D=40, V=140, bias=F32), "bf16": make(150, D=40, V=140, dtype=BF16, bias=BF16)}
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one row": lambda t: t[7:8],
    "three rows": lambda t: t[100:103],
    "all but one": lambda t: t[1:],
    "another order": lambda t: t[PERMUTED],
}
LONG = make(800, D=4, V=300, bias=F32, mask=some)
#: Everything at once; the least of everything; all columns and the least of rows.
WORKSPACES = (None, 0, 1 << 20)


def padded_with_masked_rows(call: Call) -> Call:
    """The same live rows, with masked ones of NaN before and between them."""
    mask = torch.arange(2 * len(call.token_ids)) % 2 == 1
    padded = call.rows(lambda t: torch.stack((torch.full_like(t, NAN if t.is_floating_point() else -7), t), 1)
                       .flatten(0, 1))  # fmt: skip
    return padded.with_options(mask=mask)


def bit_calls() -> dict[str, Call]:
    result = {f"{name}: whole": call for name, call in WHOLE.items()}
    result |= {f"{n}: {part}": call.rows(cut) for n, call in WHOLE.items() for part, cut in PARTS.items()}
    result |= {f"{name}: padded": padded_with_masked_rows(call) for name, call in WHOLE.items()}
    rolled = WHOLE["fp32"]
    result["control"] = replace(rolled, hidden=rolled.hidden.roll(1, -1), weight=rolled.weight.roll(1, -1))
    result |= {f"workspace {n}": LONG.with_options(workspace_bytes=n) for n in WORKSPACES}
    result["frozen"] = replace(result["workspace 0"], wanted=("hidden",))
    result["one temperature"] = CALLS["fp32"].with_options(temperature=0.75)
    result["that temperature for all rows"] = CALLS["fp32"].with_options(temperature=torch.full((7,), 0.75))
    result["bad id"] = with_a_bad_id(CALLS["bias"])
    result["infinite weight"] = infinite_weight()
    return result


def with_a_bad_id(call: Call) -> Call:
    ids = call.token_ids.clone()
    ids[3] = len(call.weight)
    return replace(call, token_ids=ids).with_options(validate=False)


def infinite_weight() -> Call:
    call = make(4, mask=lambda lead: torch.tensor([1, 0, 1, 1]))
    weight = call.weight.clone()
    weight[5] = INF
    return replace(call, weight=weight)


def assert_near(result: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> None:
    coarse = {BF16: 2**-7, F16: 2**-9, F32: 1e-5, F64: 1e-13}[dtype]
    for name, value in result.items():
        limit = 5e-6 if dtype != F64 else 1e-13
        if name not in OUTPUTS and exact[name].numel():
            limit = coarse * float(exact[name].abs().max()) + 1e-12
        assert value.shape == exact[name].shape and bool(value.isfinite().all()), name
        torch.testing.assert_close(value.double(), exact[name], rtol=coarse, atol=limit, msg=lambda m, n=name:
                                   f"{n}: {m}")  # fmt: skip


def assert_same_bits(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in result.items():
        kind = torch.int16 if value.dtype.itemsize == 2 else torch.int32
        assert torch.equal(value.contiguous().view(kind), expected[name].contiguous().view(kind)), name
