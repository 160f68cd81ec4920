"""The kernel for Hopper that computes the gradients of a chunk, run on a CPU: every bit that it stores, and
that no partition overtakes another in the buffers that they share."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_on_a_cpu import slowed
from isobit.frame.launch import Recorder
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.ops.delta_rule import kernels_hopper as backwards
from isobit.ops.delta_rule import kernels_hopper_io as backwards_io
from isobit.ops.gated_delta_rule import (
    kernels_hopper,
    kernels_hopper_gradients,
    kernels_hopper_solve,
    model,
    model_bwd,
)
from isobit.ops.gated_delta_rule.kernels_hopper_gradients import gradients
from isobit.ops.gated_delta_rule.kernels_triton import tiles_of
from isobit.ops.gated_delta_rule.model import CHUNK, CPU
from test_delta_rule_hopper import Room, Walked
from test_gated_delta_hopper import Steps

BF16, FP16 = torch.bfloat16, torch.float16
K = V = 128

#: What is not stored is not 0 by chance.
UNTOUCHED = 7.0

NAMES = ("dq", "dk", "dv", "dbeta", "dgate", "dlast")


def on_a_cpu(args: dict[str, Any], programs: int = 2) -> dict[str, Tensor]:
    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        device = Walked(grid[0], Steps)
        scope = device.scope(
            hopper_pipe, kernels_hopper_gradients, kernels_hopper_solve, backwards_io, backwards,
            tma_store=device.store_box, tma=SimpleNamespace(store_wait=device.store_wait),
            reinterpreted=Room.reinterpret,
        )  # fmt: skip
        for written in values[:6]:
            written.fill_(UNTOUCHED)
        constants = (options[name] for name in kernel.arg_names[len(values) :])
        device.run(scope, kernel, (*values, *constants))

    found = gradients(**args, launch=launch, sms=programs)
    return {n: t for n, t in zip(NAMES, found, strict=True) if t is not None}


def made(
    B: int, T: int, H: int, group: int, mode: str = "gn", v_first: bool = False,
    bounds: list[int] | None = None, dtype: torch.dtype = BF16,
) -> dict[str, Any]:  # fmt: skip
    """Inputs as earlier kernels might give them. g: gates; n: rows are normalized."""
    gen, HV = torch.Generator().manual_seed(T), H * group
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    tiles = tiles_of(T, B if bounds is None else len(bounds) - 1, cu)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    raw = {n: drawn(B, T, H, K).to(dtype) for n in ("raw_q", "raw_k")}
    if "n" not in mode:
        raw = {n: x / 8 for n, x in raw.items()}
    args: dict[str, Any] = dict(raw)
    for n in ("q", "k"):
        x = raw[f"raw_{n}"]
        args[n] = torch.from_numpy(model.l2norm(x.float().numpy(), dtype)).to(dtype) if "n" in mode else x
    for n in ("v", "do", "new", "dvn"):
        args[n] = drawn(B, T, HV, V).to(dtype)
    state = (tiles, HV, V, K) if v_first else (tiles, HV, K, V)
    args |= {"states": (drawn(*state) / 4).to(dtype), "dstates": (drawn(*state) / 4).to(dtype)}
    inverse = drawn(B, T, HV, CHUNK) / 8
    for at in places(args | {"cu_seqlens": cu}):
        own = inverse[at.batch, at.rows]
        own[:] = own.permute(1, 0, 2).tril().permute(1, 0, 2)
    args["inverse"] = inverse.to(dtype)
    args["beta"] = drawn(B, T, HV).sigmoid()
    args["g2"] = -drawn(B, T, HV).abs() if "g" in mode else None
    args |= {"norms": tuple(inverse_norms(raw[n]) for n in raw) if "n" in mode else None}
    return args | {"cu_seqlens": cu, "scale": 0.3, "v_first": v_first}


def inverse_norms(x: Tensor) -> Tensor:
    """As the model has them, [B, T, H]."""
    own = x.float().numpy()
    return torch.from_numpy(np.float32(1) / np.sqrt(model_bwd.halved(own * own, -1) + model.EPS))


def places(args: dict[str, Any]) -> list[Any]:
    """Batch, rows and tile of every chunk."""
    B, T = args["v"].shape[:2]
    cu = args["cu_seqlens"]
    found = []
    if cu is None:
        each = -(-T // CHUNK)
        for b in range(B):
            for c in range(each):
                rows = slice(c * CHUNK, min((c + 1) * CHUNK, T))
                found.append(SimpleNamespace(batch=b, rows=rows, tile=b * each + c))
    else:
        for n, (first, end) in enumerate(pairwise(cu.tolist())):
            for c, at in enumerate(range(first, end, CHUNK)):
                rows = slice(at, min(at + CHUNK, end))
                found.append(SimpleNamespace(batch=0, rows=rows, tile=first // CHUNK + n + c))
    return found


def of_the_class(args: dict[str, Any]) -> dict[str, Tensor]:
    """Steps 9 to 14 by the model, chunk by chunk, with the parts that `finish_kernel` adds."""
    v, q, dtype, normed = args["v"], args["q"], args["q"].dtype, args["norms"] is not None
    B, T, HV, _ = v.shape
    H, gated, tiles = q.shape[2], args["g2"] is not None, args["states"].shape[0]
    found = {n: torch.full_like(args[n[1:]], UNTOUCHED) for n in ("dq", "dk", "dv")}
    found["dbeta"] = torch.full((3, B * T, HV), UNTOUCHED)
    if gated:
        found["dgate"] = torch.full((3, B * T, HV), UNTOUCHED)
        found["dlast"] = torch.full((tiles, HV, 2), UNTOUCHED)
    call = model_bwd.Call(CPU, dtype, np.float32(args["scale"]), gated)
    parts: list[list[Any]] = []

    added = model_bwd.added

    def kept(given: list[Any]) -> Any:
        parts.append(given)
        return added(given)

    with mock.patch.object(model_bwd, "added", kept):
        for at in places(args):
            _one(args, at, call, found, parts, H, HV, T, dtype, normed)
    return found


def _one(
    args: dict[str, Any], at: Any, call: Any, found: dict[str, Tensor], parts: list[list[Any]], H: int,
    HV: int, T: int, dtype: torch.dtype, normed: bool,
) -> None:  # fmt: skip
    def rows_of(x: Tensor, heads: int = HV) -> Any:
        own = x[at.batch, at.rows].float().movedim(1, 0).repeat_interleave(heads // x.shape[2], 0)
        return model_bwd.filled(own.numpy())

    def state_of(x: Tensor) -> Any:
        own = x[at.tile].float()
        return np.ascontiguousarray((own.mT if args["v_first"] else own).numpy())

    left = at.rows.stop - at.rows.start
    q, k, v, beta, T_inv, new, do, dvn = (
        rows_of(args[n]) for n in ("q", "k", "v", "beta", "inverse", "new", "do", "dvn")
    )
    g2 = np.zeros((HV, CHUNK), np.float32) if args["g2"] is None else rows_of(args["g2"])
    chunk = model_bwd.Chunk(left, q, k, v, beta, g2, T_inv, v, state_of(args["states"]), new, do)
    parts.clear()
    with np.errstate(all="ignore"):
        d = model_bwd.of_chunk(chunk, dvn, state_of(args["dstates"]), call)
        totals = {"dq": model_bwd.by_key_heads(H, d.dq), "dk": model_bwd.by_key_heads(H, *d.dk)}
        if normed:
            for n in totals:
                raw = args[f"raw_{n[1:]}"][at.batch, at.rows].float().movedim(1, 0).numpy()
                totals[n] = model_bwd.norm_gradient(model_bwd.filled(raw), totals[n], dtype)
    for n, x in (*totals.items(), ("dv", d.dv)):
        found[n][at.batch, at.rows] = torch.from_numpy(x[:, :left]).movedim(0, 1).to(dtype)
    here = slice(at.batch * T + at.rows.start, at.batch * T + at.rows.stop)
    *_, of_beta, of_gate, of_last = parts
    found["dbeta"][:, here] = torch.from_numpy(np.stack(of_beta)[:, :, :left]).movedim(1, 2)
    if call.gated:
        found["dgate"][:, here] = torch.from_numpy(np.stack(of_gate)[:, :, :left]).movedim(1, 2)
        found["dlast"][at.tile] = torch.from_numpy(np.stack(of_last, -1))


def same_bits(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for n, x in right.items():
        own = found[n]
        assert own.dtype == x.dtype and own.shape == x.shape
        wrong = (own.view(torch.uint8) != x.view(torch.uint8)).sum()
        assert wrong == 0, f"{n}: {int((own != x).sum())} of {x.numel()} differ"


PACKED = [0, 3, 3, 70, 134, 140]


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("mode", ["", "g", "n", "gn"])
def test_has_the_bits_of_the_class(mode: str, v_first: bool) -> None:
    args = made(1, 128, 1, 2, mode, v_first)
    same_bits(on_a_cpu(args), of_the_class(args))


@pytest.mark.parametrize(
    ("B", "T", "H", "group", "bounds", "dtype"),
    [
        (2, 70, 1, 1, None, BF16),  # a last chunk of 6 rows, next to the other sequence's first
        (1, 64, 2, 2, None, FP16),
        (1, 140, 1, 2, PACKED, BF16),  # with an empty sequence and empty tiles
        (1, 140, 2, 1, PACKED, FP16),
    ],
)
def test_chunks_of_all_lengths(
    B: int, T: int, H: int, group: int, bounds: list[int] | None, dtype: torch.dtype
) -> None:
    args = made(B, T, H, group, "gn", bounds=bounds, dtype=dtype)
    same_bits(on_a_cpu(args), of_the_class(args))


@pytest.mark.parametrize("left", [1, 15, 31, 33, 63])
def test_rows_of_others_may_be_nan(left: int) -> None:
    """The rows after a chunk are those of another sequence, and after the last one of none."""
    args = made(1, 132, 1, 2, "gn", bounds=[0, left, 129, 129])
    right = of_the_class(args)
    for first, end in ((left, 129), (0, left)):
        own = {n: x.clone() if isinstance(x, Tensor) else x for n, x in args.items()}
        for x in own.values():
            if isinstance(x, Tensor) and x.is_floating_point() and x.shape[:2] == (1, 132):
                x[:, first:end] = x[:, 129:] = float("nan")
        found, here = on_a_cpu(own), slice(0, left) if first else slice(left, 129)
        for n in ("dq", "dk", "dv"):
            assert torch.equal(found[n][:, here], right[n][:, here]), n
        for n in ("dbeta", "dgate"):
            assert torch.equal(found[n][:, here], right[n][:, here]), n
        tile = slice(0, 1) if first else slice(1, 3)
        assert torch.equal(found["dlast"][tile], right["dlast"][tile])
        assert bool((found["dq"][:, 129:] == UNTOUCHED).all())


@pytest.mark.parametrize("name", ["q", "v", "do", "new", "dvn", "inverse", "states", "dstates"])
def test_what_is_not_finite_is_where_the_class_has_it(name: str) -> None:
    """In a chunk of 6 rows."""
    args = made(1, 70, 1, 1, "g")
    args[name][(0, 67) if name not in ("states", "dstates") else (1,)][..., 5] = float("inf")
    args["raw_q"] = args["q"]
    found, right = on_a_cpu(args), of_the_class(args)
    assert not all(bool(x.isfinite().all()) for x in right.values())
    for n, x in right.items():
        assert torch.equal(found[n].isnan(), x.isnan()), n
        assert torch.equal(found[n].nan_to_num(5.0), x.nan_to_num(5.0)), n


@pytest.mark.parametrize("who", range(4))
@pytest.mark.parametrize(("mode", "group"), [("gn", 1), ("gn", 2), ("g", 2)])
def test_whoever_is_slow_the_bits_are_the_same(
    mode: str, group: int, who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program, so that all items share its buffers: both warpgroups, the producer of tiles and that
    of gates."""
    args = made(1, 199, 1, group, mode, bounds=[0, 64, 64, 128, 131, 199])
    right = of_the_class(args)
    slowed(monkeypatch, who, (Walked, "store_wait"))
    same_bits(on_a_cpu(args, 1), right)


def test_a_call_without_tokens_launches_nothing() -> None:
    args = made(0, 64, 1, 1, "g")
    found = on_a_cpu(args)
    assert [found[n].numel() for n in NAMES] == [0] * len(NAMES)


@pytest.mark.parametrize(("K", "called"), [(128, True), (64, False)])
def test_the_backward_takes_it_where_it_serves(K: int, called: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_hopper, "sm_count", lambda device: 132)

    def on_meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    args = {n: on_meta(1, 128, 1, K) for n in ("q", "k")} | {n: on_meta(1, 128, 2, K) for n in ("v", "do")}
    args |= {n: on_meta(1, 128, 2, dtype=torch.float32) for n in ("g", "beta")}
    recorder = Recorder()
    results = kernels_hopper.gated_delta_rule_bwd(
        launch=recorder, fold=partial(kernels_hopper.fold, sms=132),
        recur=partial(kernels_hopper.recurrences, sms=132), **args,
        inverse=on_meta(1, 128, 2, CHUNK),
        initial_state=None, dfinal_state=None, cu_seqlens=None, scale=0.1, state_v_first=False,
        use_qk_l2norm_in_kernel=True, want_initial_state=False,
        **{f"want_{n}": True for n in ("q", "k", "v", "g", "beta")},
    )  # fmt: skip
    names = [kernel.__name__ for kernel, _, _ in recorder.launches]
    assert kernels_hopper.gated_delta_rule_bwd.keywords["fold"] is kernels_hopper.fold
    assert ("folding_kernel" in names) == called and ("fold_kernel" in names) != called
    assert ("gradients_kernel" in names) == called and ("dk_kernel" in names) != called
    for found, n in zip(results, ("q", "k", "v", "g", "beta"), strict=False):
        assert found is not None and (found.shape, found.dtype) == (args[n].shape, args[n].dtype)


@pytest.mark.parametrize("packed", [False, True])
def test_recurrences_that_run_side_by_side_wait_for_nothing_of_each_other(packed: bool) -> None:
    """All that the second one reads was launched before the first one."""

    def on_meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    wide, rows = on_meta(1, 128, 2, 128), on_meta(1, 128, 1, 128)
    gate, state = on_meta(1, 128, 2, dtype=torch.float32), on_meta(3, 2, 128, 128, dtype=torch.float64)
    bounds = on_meta(4, dtype=torch.int32) if packed else None
    recorder = Recorder()

    def copied(t: Tensor) -> Tensor:  # as of a state whose address TMA cannot read
        recorder.launches.append((SimpleNamespace(__name__="copy"), (), {}))
        return t

    forwards = (rows, wide, wide, gate, None, state, bounds, None, 5, False, True, False)
    backwards_of = {
        "q": rows, "k": rows, "w": wide, "do": wide, "dv": wide, "g": gate, "gk": None, "h0": state,
        "dht": state, "scale": 0.1, "state_v_first": False, "cu_seqlens": bounds, "chunk_size": 64,
        "use_exp2": True, "chunk_offsets": None,
        "chunk_indices": on_meta(5, 2, dtype=torch.int32) if packed else None,
    }  # fmt: skip
    with mock.patch.object(backwards, "placed", copied):
        kernels_hopper.recurrences(forwards, backwards_of, recorder, 132)
    *earlier, (first, _, of_first), (second, _, of_second) = recorder.launches
    assert {kernel.__name__ for kernel, _, _ in earlier} >= {"copy"}
    assert (first.__name__, second.__name__) == ("states_kernel", "dhu_kernel")
    assert of_first["OVERLAPPING"] and of_second["OVERLAPPING"] and of_second["launch_pdl"]
    assert "launch_pdl" not in of_first  # it reads what was launched before
    recorder.launches.clear()
    backwards.dhu(launch=recorder, sms=132, **backwards_of)
    kernels_hopper.carried(*forwards, recorder, sms=132)
    for _, _, options in recorder.launches:
        assert not options.get("OVERLAPPING") and "launch_pdl" not in options


def test_few_chunks_of_many_heads_are_left_to_kernels_that_spread_them() -> None:
    def spread(items: int, group: int) -> bool:
        return kernels_hopper.is_spread(items, group, 132)

    assert spread(1, 1) and spread(1, 2) and spread(16384, 1) and spread(2048, 2) and spread(256, 16)
    assert not spread(1, 4) and not spread(4, 32) and not spread(32, 16)


def test_says_what_it_does_not_serve() -> None:
    def why(K: int, V: int, dtype: torch.dtype = BF16) -> str | None:
        q, v = (torch.empty(1, 1, 1, n, dtype=dtype) for n in (K, V))
        return kernels_hopper_gradients.why_not(q, v)

    assert why(128, 128) is None
    assert "K=64" in str(why(64, 128)) and "V=256" in str(why(128, 256))
    assert "bf16" in str(why(128, 128, torch.float32))
