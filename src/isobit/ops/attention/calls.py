"""Properties of a call that follow from shapes and scalars alone. Kernels and models both use them."""

from typing import Any, NamedTuple

import torch

from isobit.kernels.host.temperature import LOG2E

#: Keys of a segment: part of the class.
SEGMENT = 1024

#: With at most this many rows (queries of a sequence times heads of a group) attention is limited by reading
#: keys.
FEW_ROWS = 64


def block_keys(D: int) -> int:
    """Keys of a block: part of the class."""
    return 64 if D > 128 else 128


class Call(NamedTuple):
    """Sizes of a call. Packed queries are one batch element with T rows."""

    sequences: int
    B: int
    T: int
    H: int
    KV: int
    D: int
    S: int  # keys per sequence at most; for packed keys, all keys together
    pages: int
    page: int  # keys per page; 0 without pages
    packed_q: bool
    packed_k: bool

    @property
    def group(self) -> int:
        """Query heads that share a head of k and v."""
        return self.H // self.KV if self.KV else 0

    @property
    def padded(self) -> int:
        """D rounded up to a power of two, as tiles need; the rest is zeros."""
        return 1 << (self.D - 1).bit_length()


def call_of(args: dict[str, Any]) -> Call:
    """The sizes of a call, from its arguments."""
    (B, T, H, D), (P, S, KV, _) = args["q"].shape, args["k"].shape
    bounds, table = args["cu_seqlens_q"], args["block_table"]
    return Call(
        sequences=B if bounds is None else len(bounds) - 1,
        B=B, T=T, H=H, KV=KV, D=D, S=S if table is None else S * table.shape[1],
        pages=P, page=0 if table is None else S,
        packed_q=bounds is not None, packed_k=bounds is not None and table is None,
    )  # fmt: skip


def key_bounds(args: dict[str, Any]) -> torch.Tensor | None:
    """Where packed sequences begin among the keys: cu_seqlens_k, or cu_seqlens_q if that is None."""
    if args["block_table"] is not None or args["cu_seqlens_q"] is None:
        return None
    given: torch.Tensor | None = args["cu_seqlens_k"]
    return args["cu_seqlens_q"] if given is None else given


def decodes(call: Call, segment: int = SEGMENT) -> bool:
    """Whether the keys of a sequence are split over programs. Depends on sizes only. Packed keys occur in
    training and are not split."""
    queries = -(-call.T // max(call.sequences, 1)) if call.packed_q else call.T
    return queries * call.group <= FEW_ROWS and segment < call.S and not call.packed_k


class Factors(NamedTuple):
    """Scores s become z = s, or in class attn/1 cap tanh(s slope), and probabilities are 2^(z c - ...). In
    attn/2 z is the tanh alone, and `slope` the factor of its exponent. The gradient of a score times `scale`
    is the gradient of the product of q and k. Computed in fp64 and passed to kernels as fp32."""

    c: float
    cap: float
    slope: float
    scale: float


def which_tanh(args: dict[str, Any], tangent: int) -> int:
    """The class whose tanh caps the scores of a call, 1 or 2; 0 if they are not capped."""
    return 0 if args["softcap"] is None else tangent


def factors_of(args: dict[str, Any], tangent: int = 1) -> Factors:
    """The factors of a call, from its scale and softcap; `tangent` is the class whose tanh caps scores."""
    scale, cap = args["scale"], args["softcap"]
    scale = args["q"].shape[-1] ** -0.5 if scale is None else scale
    if cap is None:
        return Factors(scale * LOG2E, 0.0, 0.0, scale)
    if tangent == 2:
        return Factors(cap * LOG2E, cap, -2 * LOG2E * scale / cap, scale)
    return Factors(LOG2E, cap, scale / cap, scale)
