"""Class conv/1 in numpy, operation by operation: the backend for CPU tensors. Every sequence is computed by
itself, so nothing in it can depend on the batch. Its class is conv/1/cpu, because silu needs an exp, and
this one is numpy's."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isobit.kernels.host.row_stream import over_rows
from isobit.kernels.host.silu import silu, silu_slope

Array = np.ndarray[Any, Any]


class Sequence(NamedTuple):
    row: int  # of x
    begin: int
    end: int


def sequences(args: dict[str, Any]) -> Iterator[Sequence]:
    """Where they are. Bounds that are not validated are clamped."""
    B, T = args["x"].shape[:2]
    packed, first = args["cu_seqlens"], args["first"]
    if packed is not None:
        ends = [min(max(int(n), 0), T) for n in packed.tolist()]
        for begin, end in pairwise(ends):
            yield Sequence(0, begin, max(begin, end))
        return
    begins = [0] * B if first is None else first.tolist()
    for b, begin in enumerate(begins):
        yield Sequence(b, min(max(int(begin), 0), T), T)


def array(t: Tensor) -> Array:
    return t.detach().float().cpu().numpy()


def narrow(x: Array, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(like.dtype).to(like.device)


def histories(args: dict[str, Any]) -> list[Array]:
    """For each sequence [W - 1 + tokens, D]: the inputs before it, and its own."""
    x, U = array(args["x"]), args["weight"].shape[-1] - 1
    state = args["initial_state"]
    before = None if state is None else array(state)
    inputs = []
    for s, (row, begin, end) in enumerate(sequences(args)):
        own = np.zeros((U, x.shape[-1]), np.float32) if before is None else before[s]
        inputs.append(np.concatenate([own, x[row, begin:end]]))
    return inputs


def sums(history: Array, args: dict[str, Any]) -> Array:
    """z of the tokens of a sequence."""
    w, bias = array(args["weight"]), args["bias"]
    W = w.shape[1]
    n = len(history) - (W - 1)
    z = np.zeros((n, len(w)), np.float32) if bias is None else np.tile(array(bias), (n, 1))
    for k in range(W):
        z = z + history[k : k + n] * w[:, k]
    return z


@np.errstate(all="ignore")
def causal_conv1d(**args: Any) -> tuple[Tensor, Tensor | None]:
    """(out, final_state)."""
    x, U = args["x"], args["weight"].shape[-1] - 1
    out = np.zeros(x.shape, np.float32)
    inputs = histories(args)
    for (row, begin, end), history in zip(sequences(args), inputs, strict=True):
        z = sums(history, args)
        out[row, begin:end] = silu(z) if args["activation"] else z
    state = None
    if args["return_final_state"]:
        last = [history[len(history) - U :] for history in inputs]
        state = narrow(np.stack(last) if last else np.zeros((0, U, x.shape[-1])), x)
    return narrow(out, x), state


@np.errstate(all="ignore")
def causal_conv1d_bwd(**args: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias); None for what is not wanted."""
    x, w, dout = args["x"], array(args["weight"]), array(args["dout"])
    B, T, D = x.shape
    W = w.shape[1]
    dx = np.zeros((B, T, D), np.float32)
    taps, alone = np.zeros((B, T, D, W), np.float32), np.zeros((B, T, D), np.float32)
    for (row, begin, end), history in zip(sequences(args), histories(args), strict=True):
        n = end - begin
        dz = dout[row, begin:end]
        if args["activation"]:
            dz = dz * silu_slope(sums(history, args))
        total = np.zeros((n, D), np.float32)
        for j in range(min(W, n)):
            total[: n - j] += dz[j:] * w[:, W - 1 - j]
        dx[row, begin:end], alone[row, begin:end] = total, dz
        for k in range(W):
            taps[row, begin:end, :, k] = dz * history[k : k + n]
    weight = args["weight"]
    return (
        narrow(dx, x) if args["want_x"] else None,
        narrow(over_rows(taps.reshape(B * T, D, W)), weight) if args["want_weight"] else None,
        narrow(over_rows(alone.reshape(B * T, D)), weight) if args["want_bias"] else None,
    )


@np.errstate(all="ignore")
def causal_conv1d_update(**args: Any) -> Tensor:
    """out; the states of the slots are written."""
    x, state, slots = args["x"], args["state"], args["slots"]
    out = np.full(x.shape, np.nan, np.float32)
    own = range(len(x)) if slots is None else slots.tolist()
    for b, slot in enumerate(own):
        if not 0 <= slot < len(state):
            continue
        history = np.concatenate([array(state[slot]), array(x[b])])
        z = sums(history, args)
        out[b] = silu(z) if args["activation"] else z
        state[slot] = narrow(history[len(history) - state.shape[1] :], state)
    return narrow(out, x)
