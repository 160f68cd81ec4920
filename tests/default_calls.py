"""Small calls of every public op, and their results and gradients under torch's defaults: those below, with
options and sizes that take every branch, or one as the op's proof makes it.

Run as a program under TRITON_INTERPRET=1 it saves those of the Triton kernels.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import isobit
from isobit.check.request import small_args
from isobit.frame.op import Op, public_ops

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

#: What a process may have set before it calls us: a dtype for new tensors, and a device for them. Torch's own
#: come last, after everything that could have left something behind.
DEFAULTS: dict[str, tuple[torch.dtype, str | None]] = {
    "bf16": (BF16, None),
    "fp64": (F64, None),
    "meta": (F32, "meta"),
    "bf16 on meta": (BF16, "meta"),
    "fp32": (F32, None),
}

#: Those that kernels are called under in the interpreter, which takes the longest. What follows a dtype or a
#: device alone follows it where both are set, too.
IN_INTERPRETER = ("fp64", "bf16 on meta", "fp32")


@contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


class Call:
    """A public op, its arguments, and which of them need a gradient."""

    def __init__(self, name: str, *wanted: str, **args: Any) -> None:
        self.name, self.wanted, self.args = name, wanted, args

    def __call__(self, backend: str) -> list[Tensor]:
        leaves = {k: self.args[k].detach().requires_grad_() for k in self.wanted}
        function: Callable[..., Any] = getattr(isobit, self.name)
        # A state is written into, so every call has its own.
        args = {
            k: v.clone() if hasattr(v, "clone") and not isinstance(v, Tensor) else v
            for k, v in self.args.items()
        }
        result = function(**args | leaves, backend=backend)
        several = result if isinstance(result, tuple) else (result,)
        outputs = [output for output in several if output is not None]
        if isinstance(outputs[-1], dict):
            outputs += (value for value in outputs.pop().values() if isinstance(value, Tensor))
        if leaves:
            several = [o for o in outputs if o.requires_grad]
            outputs += torch.autograd.grad(several, list(leaves.values()), [_slope(o) for o in several])
        return [o.detach() for o in outputs]


def _slope(out: Tensor) -> Tensor:
    """A cotangent that is not the same everywhere."""
    return (out.detach() * 0 + 1).cumsum(-1) if out.ndim else out.detach() * 0 + 1


def a_loss(logp: Tensor, entropy: Tensor, gains: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return (gains[:, None] * (logp + 0.1 * entropy)).sum(), {"logp": logp.sum()}


def calls() -> dict[str, Call]:
    """Built with torch's own defaults: later only the defaults around the calls change, not their inputs."""
    written = _written_calls()
    there = {call.name for call in written.values()}
    return written | {name: _of_its_proof(op) for name, op in public_ops().items() if name not in there}


def _of_its_proof(op: Op) -> Call:
    args = small_args(op, torch.device("cpu"))
    return Call(op.name, *(name for name in op.differentiable if args[name] is not None), **args)


def _written_calls() -> dict[str, Call]:
    gen = torch.Generator().manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(shape, generator=gen).to(dtype)

    everything = {"return_entropy": True, "return_lse": True}
    ids, live = torch.tensor([[3, 0, -100], [8, 1, 5]]), torch.tensor([[1, 1, 1], [1, 0, 1]])
    bad = ids.clone()
    bad[0, 1] = 99  # no token: its row is NaN
    tokens = {"token_ids": bad, "mask": live, "validate": False, "temperature": 0.7}
    head = {"weight": randn(9, 20), "bias": randn(9)}
    narrow = {name: t.to(BF16) for name, t in head.items()}
    differentiated = ("hidden", "weight", "bias")
    a, b, bias = randn(3, 40, dtype=BF16), randn(40, 5, dtype=BF16), randn(5)
    x, dy = randn(600, 6, dtype=BF16), randn(600, 4, dtype=BF16)
    stream = {"mask": randn(600) > -0.5, "cu_seqlens": torch.tensor([0, 70, 600])}
    return {
        "logp": Call("logp", "logits", logits=randn(2, 3, 9), **tokens, **everything),
        "logp of splits": Call(
            "logp", "logits", logits=randn(2, 17000, dtype=BF16), token_ids=ids[0, :2], **everything
        ),
        "linear_logp": Call(
            "linear_logp", *differentiated, hidden=randn(2, 3, 20), **head, **tokens, **everything
        ),
        "linear_logp, a temperature a row": Call(
            "linear_logp", *differentiated, hidden=randn(2, 3, 20, dtype=BF16), **narrow,
            **tokens | {"temperature": randn(2, 3).abs() + 0.5}, logits_dtype=BF16, softcap=5.0,
        ),
        "linear_policy_loss": Call(
            "linear_policy_loss", *differentiated, hidden=randn(2, 3, 20, dtype=BF16), **narrow,
            token_ids=ids, mask=live, loss_fn=a_loss, inputs={"gains": randn(2)}, entropy=True,
            workspace_bytes=4 * 9 * 3,
        ),
        "linear_policy_loss of nothing": Call(
            "linear_policy_loss", "hidden", "weight", hidden=randn(0, 20), weight=randn(9, 20),
            token_ids=ids[0, :0], loss_fn=a_loss, inputs={"gains": randn(0)}, entropy=True,
        ),
        "ratio_kl": Call(
            "ratio_kl", "policy_logits", policy_logits=randn(2, 3, 9), ref_logits=randn(2, 3, 9, dtype=BF16),
            **tokens, old_logp=randn(2, 3), return_logp=True, return_entropy=True,
        ),
        "ratio_kl of log-probabilities": Call(
            "ratio_kl", "policy_logits", policy_logits=randn(3, 9, dtype=BF16), ref_logits=None,
            token_ids=ids[0], ref_logp=randn(3), temperature=randn(3).abs() + 0.5,
        ),
        "ratio_kl of nothing": Call(
            "ratio_kl", "policy_logits", policy_logits=randn(0, 9), ref_logits=None, token_ids=ids[0, :0],
            return_kl=False,
        ),
        "attention": Call(
            "attention", "q", "k", "v", q=randn(2, 3, 2, 64, dtype=BF16), k=randn(2, 9, 1, 64, dtype=BF16),
            v=randn(2, 9, 1, 64, dtype=BF16), key_start=torch.tensor([0, 8]), softcap=4.0, return_lse=True,
        ),
        "attention of nothing": Call(
            "attention", "q", q=randn(1, 0, 2, 64, dtype=BF16), k=randn(1, 9, 1, 64, dtype=BF16),
            v=randn(1, 9, 1, 64, dtype=BF16),
        ),
        "attention from pages": Call(
            "attention", q=randn(3, 2, 64, dtype=BF16), k=randn(2, 16, 1, 64, dtype=BF16),
            v=randn(2, 16, 1, 64, dtype=BF16), cu_seqlens_q=torch.tensor([0, 1, 3]),
            block_table=torch.tensor([[1], [0]]), key_end=torch.tensor([5, 16]),
        ),
        "rms_norm": Call(
            "rms_norm", "x", "weight", "residual", x=randn(2, 3, 40, dtype=BF16), weight=randn(40),
            residual=randn(2, 3, 40, dtype=BF16), offset=1.0, cast="after",
        ),
        "rms_norm of nothing": Call("rms_norm", "x", "weight", x=randn(0, 9), weight=randn(9)),
        "rope": Call(
            "rope", "q", "k", q=randn(2, 3, 4, 8, dtype=BF16), k=randn(2, 3, 2, 8, dtype=BF16),
            cos=randn(3, 8, dtype=BF16), sin=randn(1, 3, 8, dtype=BF16), rounding="vllm",
        ),
        "rope of nothing": Call(
            "rope", "q", "k", q=randn(0, 2, 8), k=randn(0, 1, 8), cos=randn(0, 4), sin=randn(0, 4)
        ),
        "swiglu": Call("swiglu", "gate", "up", gate=randn(2, 9, dtype=BF16), up=randn(2, 9, dtype=BF16)),
        "swiglu of nothing": Call("swiglu", "gate", "up", gate=randn(0, 9), up=randn(0, 9)),
        "attention_sink": Call(
            "attention_sink", "x", "lse", "sinks", x=randn(2, 3, 2, 8, dtype=BF16), lse=randn(2, 3, 2),
            sinks=randn(2),
        ),
        "logp of one row": Call("logp", "logits", logits=randn(9), token_ids=torch.tensor(3)),
        "det_gemm": Call("det_gemm", "a", "b", a=a, b=b),
        "det_gemm in fp32": Call("det_gemm", "a", "b", a=a, b=b, out_dtype=F32),
        "det_linear": Call("det_linear", "x", "weight", "bias", x=a, weight=b.t(), bias=bias),
        "det_gemm_dw": Call("det_gemm_dw", x=x, dy=dy, **stream),
        "det_gemm_dw from a start": Call("det_gemm_dw", x=x, dy=dy, init=randn(4, 6)),
        "grpo_loss": Call(
            "grpo_loss", "policy_logits", policy_logits=randn(2, 2, 9), ref_logits=randn(2, 2, 9),
            token_ids=ids[:, :2], mask=live[:, :2], beta=0.1, return_entropy=True, rewards=randn(2),
            group_boundaries=[0, 2], normalizer=3,
        ),
        "grpo_loss of nothing": Call(
            "grpo_loss", "policy_logits", policy_logits=randn(0, 2, 9), ref_logits=None,
            token_ids=ids[:0, :2], advantages=randn(0),
        ),
        "group_advantages": Call("group_advantages", rewards=randn(6), samples_per_prompt=3),
        "group_advantages by boundaries": Call(
            "group_advantages", rewards=randn(6), group_boundaries=[0, 1, 6]
        ),
        "logp of nothing": Call("logp", "logits", logits=randn(0, 9), token_ids=ids[0, :0], **everything),
        "linear_logp of nothing": Call(
            "linear_logp", "hidden", "weight", hidden=randn(0, 20), weight=randn(9, 20),
            token_ids=ids[0, :0], **everything,
        ),
        "det_gemm of no rows": Call("det_gemm", "a", "b", a=a[:0], b=b),
        "det_gemm over nothing": Call("det_gemm", "a", "b", a=a[:, :0], b=b[:0], out_dtype=F32),
        "det_linear of no rows": Call("det_linear", "x", "weight", "bias", x=a[:0], weight=b.t(), bias=bias),
        "det_linear over nothing": Call(
            "det_linear", "x", "weight", "bias", x=a[:, :0], weight=b.t()[:, :0], bias=bias
        ),
        "det_gemm_dw of no rows": Call("det_gemm_dw", x=x[:0], dy=dy[:0]),
        "det_gemm_dw of no rows from a start": Call("det_gemm_dw", x=x[:0], dy=dy[:0], init=randn(4, 6)),
        "det_gemm_dw of no columns": Call("det_gemm_dw", x=x[:, :0], dy=dy),
    }  # fmt: skip


def in_process(call: Call) -> str:
    """The backend that serves CPU tensors if none is named."""
    op = public_ops()[call.name]
    backend = op.explain(**small_args(op, torch.device("cpu"))).backend
    assert backend is not None
    return backend


def results(
    backend_of: Callable[[Call], str], names: Iterable[str] = tuple(DEFAULTS)
) -> dict[str, dict[str, list[Tensor] | str]]:
    """Of every call under these defaults, and under torch's own as "". An error is its text."""
    made = calls()
    backends = {name: backend_of(call) for name, call in made.items()}
    by_default: dict[str, dict[str, list[Tensor] | str]] = {}
    for default, given in {"": (F32, None), **{name: DEFAULTS[name] for name in names}}.items():
        by_default[default] = {}
        with defaults(*given), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, call in made.items():
                try:
                    by_default[default][name] = call(backends[name])
                except Exception as error:  # a test shows it, with those of other calls
                    by_default[default][name] = f"{type(error).__name__}: {error}"
    return by_default


if __name__ == "__main__":
    torch.save(results(lambda call: "triton", IN_INTERPRETER), sys.argv[1])
