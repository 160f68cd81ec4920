"""What people use instead of `gated_delta_rule_step`, and the sizes at which both are timed.

A series has the place in the chunk at which all sequences are, and one decodes a whole chunk: 64 calls of one
token each, the first of which closes the chunk before. In the others the counts are put back before each
call, which is a small copy: it is in the time.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from isobit.ops.gated_delta_rule import reference
from isobit.ops.gated_delta_rule.op import gated_delta_rule
from isobit.ops.gated_delta_rule_step.op import declared, gated_delta_rule_step
from isobit.ops.gated_delta_rule_step.proof import PROOF
from isobit.ops.gated_delta_rule_step.proof.inputs import BY_TOKEN, histories
from isobit.ops.gated_delta_rule_step.state import CHUNK
from isobit.spec.options import known_options
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.rotation import copies_for
from isobit.spec.series import Pool, Series
from isobit.spec.trial import cloned
from isobit.spec.truth import Errors, errors_of

FLA = "fla.ops.gated_delta_rule"


# FLA's recurrence. It needs the state after all tokens so far.


def _with_states(args: Args) -> Args:
    prompts = [args["state"].prompts[slot] for slot in range(args["q"].shape[0])]
    given = {n: args[n] for n in (*BY_TOKEN, "scale", "use_qk_l2norm_in_kernel") if args[n] is not None}
    if prompts[0]["q"].shape[1] == 0:
        HV, V = args["v"].shape[2:]
        return given | {
            "initial_state": args["v"].new_zeros(len(prompts), HV, args["q"].shape[-1], V).float()
        }
    whole: Args = {n: torch.cat([p[n] for p in prompts]) if args[n] is not None else None for n in BY_TOKEN}
    norm = args["use_qk_l2norm_in_kernel"]
    _, final = gated_delta_rule(**whole, output_final_state=True, use_qk_l2norm_in_kernel=norm)
    return given | {"initial_state": final}


def _fla(args: Args) -> Tensor:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    o: Tensor = fused_recurrent_gated_delta_rule(**args, output_final_state=True)[0]
    return o


def _fla_chunk(args: Args) -> Tensor:
    for _ in range(CHUNK):
        out = _fla(args)
    return out


def _available(case: Case, device: torch.device) -> str | None:
    return cannot_import(FLA) or ("its kernels need a GPU" if device.type == "cpu" else None)


# What is timed


def _make(case: Case, pool: Pool) -> list[Args]:
    args = PROOF.make(case, pool.device, pool.inputs)
    return [args, *(cloned(args) for _ in range(copies_for(args["state"].nbytes, pool.device) - 1))]


def _call(args: Args, backend: str | None) -> Tensor:
    args["state"].place.copy_(args["state"].begun)
    return gated_delta_rule_step(**args, backend=backend)


def _chunk(args: Args, backend: str | None) -> Tensor:
    """From a full chunk to the next full one: no count has to be put back."""
    for _ in range(CHUNK):
        out = gated_delta_rule_step(**args, backend=backend)
    return out


def _row_bytes(dims: dict[str, int], t: int) -> int:
    """The state in 16 bits, t rows that are stored and one that is written, and the call's own tensors."""
    H, HV, K, V = dims["H"], dims["HV"], dims["K"], dims["V"]
    rows = (t + 1) * (HV * (4 * V + 4 * CHUNK + 8) + 2 * H * K)
    return dims["B"] * (2 * HV * K * V + rows + 4 * H * K + 4 * HV * V + 8 * HV)


def _cost(t: int, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    return Cost(fwd_bytes=_row_bytes(dims, t))


def _cost_of_chunk(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """All rows, and the closing: the state read in fp32, and written in fp32 and in 16 bits."""
    H, HV, K, V = dims["H"], dims["HV"], dims["K"], dims["V"]
    closing = HV * (10 * K * V + 2 * CHUNK * V) + 2 * H * CHUNK * K
    return Cost(fwd_bytes=sum(_row_bytes(dims, t) for t in range(CHUNK)) + dims["B"] * closing)


@dataclass(frozen=True)
class _OneHead:
    """Truth in fp64: the new token of the first sequence, in the last value head."""

    known: Tensor

    def error(self, direction: str, result: tuple[Tensor, ...]) -> Errors:
        return errors_of(result[0][:1, :, -1:], self.known)


def _judge(args: Args) -> _OneHead | None:
    """Heads and sequences are independent, so one is enough."""
    own = histories(args)[0]
    assert own is not None
    whole = {n: t[:, :, -1:].double() if n in BY_TOKEN and t is not None else t for n, t in own[0].items()}
    return _OneHead(reference.formula(**whole)[0][:, own[1] :])


#: Heads of Qwen3-Next: 32 value heads, 16 of q and k.
def _case(B: int, at: int) -> Case:
    dims = {"B": B, "T": 1, "H": 16, "HV": 32, "K": 128, "V": 128}
    return Case(dims, torch.bfloat16, data="random", options={"at": at})


def _small(at: int) -> list[Case]:
    """For a CPU."""
    dims = {"B": 1, "T": 1, "H": 1, "HV": 1, "K": 64, "V": 64}
    return [Case(dims, torch.bfloat16, data="random", options={"at": at})]


BATCHES = (1, 8, 64, 256)
PLACES = (0, 31, 63)


def _series(at: int) -> Series:
    cases = [_case(B, at) for B in BATCHES]
    return Series(
        op=declared, name=f"gated_delta_rule_step_{at}", cases=cases, core=cases[::2], make=_make, call=_call,
        cost=partial(_cost, at), judge=_judge, directions=("fwd",), takes=tuple(known_options(declared)),
        rivals={"fla": Rival("fla", _fla, prepare=_with_states, available=_available,
                             directions=("fwd",), takes=None)},
        against="fla", declared_only=True, kernels=lambda case: case.dims["B"] <= 2, small=_small(at),
        about=f"one token, row {at} of its chunk",
    )  # fmt: skip


_WHOLE = [_case(B, CHUNK) for B in BATCHES]

SERIES = (
    *(_series(at) for at in PLACES),
    Series(
        op=declared, name="gated_delta_rule_step_chunk", cases=_WHOLE, core=_WHOLE[::2], make=_make,
        call=_chunk, cost=_cost_of_chunk, judge=lambda args: None, directions=("fwd",),
        takes=tuple(known_options(declared)),
        rivals={"fla": Rival("fla", _fla_chunk, prepare=_with_states, available=_available,
                             directions=("fwd",), takes=None)},
        against="fla", declared_only=True, kernels=lambda case: case.dims["B"] <= 2, small=_small(CHUNK),
        about="a chunk of 64 tokens, one by one, with its closing update",
    ),
)  # fmt: skip
