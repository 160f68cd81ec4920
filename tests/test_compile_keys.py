"""Another batch compiles nothing: what Triton specialises on (numbers that are 1 or a multiple of 16, widths
of integers, constants) is the same for every number of rows."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.frame.contract import MISSING
from isobit.frame.launch import Recorder
from isobit.kernels.host.token_stream import Stream
from isobit.ops.delta_rule import kernels_hopper as delta_rule_hopper
from isobit.ops.delta_rule import kernels_triton as delta_rule
from isobit.ops.det_gemm import kernels_triton as products
from isobit.ops.linear_logp import kernels_triton as linear
from isobit.ops.linear_logp import kernels_triton_bwd as linear_bwd
from isobit.ops.linear_logp.op import forward
from isobit.ops.logp import kernels_triton as logp
from isobit.ops.ratio_kl import kernels_triton as ratio_kl

BF16, F32 = torch.bfloat16, torch.float32

#: A decoding step, an odd batch, a multiple of 16, a training batch.
ROWS = (1, 33, 64, 4096)


def empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def keys(record: Callable[[Recorder, int], None], N: int) -> dict[str, set[str]]:
    """What every kernel of a call is compiled for, by kernel."""
    recorder, found = Recorder(), {}
    record(recorder, N)
    for name, source, options in recorder.sources():
        found.setdefault(name, set()).add(f"{source.hash()} {sorted(options.items())}")
    return found


def assert_one_key(record: Callable[[Recorder, int], None], sizes: Sequence[int]) -> None:
    by_size = {N: keys(record, N) for N in sizes}
    for name in set().union(*by_size.values()):
        several = {N: found[name] for N, found in by_size.items() if name in found}
        first = next(iter(several.values()))
        assert all(found == first for found in several.values()), (name, several)


def by_rows(lead: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: empty(*lead) for name in ("entropy", "dlogp", "dentropy", "dlse")}


@pytest.mark.parametrize("own_temperature", [False, True])
@pytest.mark.parametrize(
    ("before", "V"), [((), 50257), ((), 151936), ((1,), 50257), ((1,), 151936), ((2,), 151936)]
)
def test_logp(before: tuple[int, ...], V: int, own_temperature: bool) -> None:
    """Few rows take other kernels than many, and each of them has one key."""

    def record(launch: Recorder, N: int) -> None:
        lead = (*before, N)
        args: dict[str, Any] = {"logits": empty(*lead, V, dtype=BF16), "mask": empty(*lead, dtype=torch.bool)}
        args |= {"token_ids": empty(*lead, dtype=torch.int64), "ignore_index": -100}
        args["temperature"] = empty(*lead) if own_temperature else 0.7
        logp.logp(launch, **args, return_entropy=True, return_lse=True, return_stats=True)
        logp.logp_bwd(launch, **args, **by_rows(lead), stats=empty(2, *lead))

    assert_one_key(record, ROWS)


@pytest.mark.parametrize("ref", ["logits", "logp"])
@pytest.mark.parametrize(("before", "V"), [((), 50257), ((1,), 151936), ((2,), 151936)])
def test_ratio_kl(before: tuple[int, ...], V: int, ref: str) -> None:
    def record(launch: Recorder, N: int) -> None:
        lead = (*before, N)
        args: dict[str, Any] = {"policy_logits": empty(*lead, V, dtype=BF16), "temperature": 0.7}
        args |= {"token_ids": empty(*lead, dtype=torch.int64), "mask": empty(*lead, dtype=torch.bool)}
        args |= {"ref_logits": empty(*lead, V) if ref == "logits" else None, "old_logp": empty(*lead)}
        args |= {"ref_logp": empty(*lead) if ref == "logp" else None, "ignore_index": -100}
        wanted = {f"return_{name}": True for name in ("kl", "logp", "entropy", "stats")}
        ratio_kl.ratio_kl(launch, **args, **wanted)
        sums = {"stats": empty(2, *lead), "slopes": empty(2, *lead), "dratio": empty(1)[0].expand(lead)}
        ratio_kl.ratio_kl_bwd(launch, **args, **sums, dkl=empty(*lead), **by_rows(lead))

    assert_one_key(record, ROWS)


@pytest.mark.parametrize("before", [(), (1,), (2,)])
def test_linear_logp(before: tuple[int, ...]) -> None:
    """With room for the gradients of all logits: a slab more is another kernel."""

    def record(launch: Recorder, N: int) -> None:
        lead, D, V = (*before, N), 1024, 5000
        args = {p.name: None if p.default is MISSING else p.default for p in forward.contract.params}
        args |= {"kept": None, "kept_base": None, "want_hidden": True, "want_weight": True}
        args |= {"hidden": empty(*lead, D, dtype=BF16), "weight": empty(V, D, dtype=BF16), "bias": empty(V)}
        args |= {"token_ids": empty(*lead, dtype=torch.int64), "mask": empty(*lead, dtype=torch.bool)}
        wanted = {f"return_{name}": True for name in ("entropy", "lse", "stats")}
        args |= {"want_bias": True, "workspace_bytes": 1 << 40, **wanted}
        linear.linear_logp(launch, **args)
        linear_bwd.linear_logp_bwd(launch, **args | by_rows(lead) | {"stats": empty(2, *lead)})

    assert_one_key(record, ROWS)


@pytest.mark.parametrize("sizes", [(1, 7, 16), (17, 33, 64), (65, 100, 4096)])  # of one tile each
@pytest.mark.parametrize("K", [512, 511])
def test_products(sizes: tuple[int, ...], K: int) -> None:
    def record(launch: Recorder, M: int) -> None:
        products.product(empty(1, M, K, dtype=BF16), empty(1, 512, K, dtype=BF16).mT, None, BF16, launch)

    assert_one_key(record, sizes)


@pytest.mark.parametrize("K", [512, 511])
def test_sums_over_rows(K: int) -> None:
    def record(launch: Recorder, T: int) -> None:
        x, dy = empty(1, T, K, dtype=BF16), empty(1, T, 512, dtype=BF16)
        tables = Stream(*(empty(n, dtype=torch.int32) for n in (T + 64, T, T, 1)))
        products.token_product(x, dy, None, None, launch)
        products.token_product(x, dy, tables, None, launch)

    assert_one_key(record, ROWS)


#: (B, T, lengths of packed sequences): one token, a part of a chunk, whole chunks, a multiple of 16
#: sequences, as many as fill a GPU, and none of these.
BATCHES: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (1, 1, ()), (1, 63, ()), (1, 64, ()), (3, 1000, ()), (16, 256, ()), (65, 4096, ()), (1, 32768, ()),
    (1, 1, (1,)), (1, 100, (0, 100)), (1, 320, (64,) * 5), (1, 1024, (64,) * 16),
    (1, 8192, (409,) * 19 + (421,)), (1, 2080, (5,) * 416),
)  # fmt: skip


def states(launch: Recorder, kernels: Any, mode: str, batch: int, K: int = 128) -> None:
    """The backward of a delta rule with 4 heads for one of these batches."""
    (B, T, lengths), V, H, HV = BATCHES[batch], 128, 2, 4
    state = empty(len(lengths) or B, HV, K, V)
    given: dict[str, Any] = {name: empty(B, T, H, K, dtype=BF16) for name in ("q", "k")}
    given |= {"w": empty(B, T, HV, K, dtype=BF16), "do": empty(B, T, HV, V, dtype=BF16)}
    given |= {"dv": empty(B, T, HV, V, dtype=BF16), "g": empty(B, T, HV) if "g" in mode else None}
    given |= {"gk": empty(B, T, HV, K) if "k" in mode else None, "h0": state if "h" in mode else None}
    given |= {"dht": state if "t" in mode else None, "scale": 0.1, "state_v_first": False, "chunk_size": 64}
    chunks = sum(-(-length // 64) for length in lengths)
    given["cu_seqlens"] = empty(len(lengths) + 1, dtype=torch.int64) if lengths else None
    given["chunk_indices"] = empty(chunks, 2, dtype=torch.int64) if lengths else None
    schedule = {"sms": 132} if kernels is delta_rule_hopper else {}
    kernels.dhu(launch=launch, **schedule, **given, chunk_offsets=None, use_exp2=True)


@pytest.mark.parametrize("mode", ["none", "ght", "kht", "gkt"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_delta_rule(packed: bool, mode: str) -> None:
    """Numbers of sequences, tokens and chunks, and lengths, are numbers at run time. On Hopper few sequences
    have a longer ring than many, if it fits: two keys at most, however many batches."""
    batches = [i for i, (_, _, lengths) in enumerate(BATCHES) if bool(lengths) == packed]
    assert_one_key(lambda launch, i: states(launch, delta_rule, mode, i), batches)
    by_ring: dict[int, list[int]] = {}
    for i in batches:
        recorder = Recorder()
        states(recorder, delta_rule_hopper, mode, i)
        (ring,) = (options["STAGES"] for _, _, options in recorder.launches if "STAGES" in options)
        by_ring.setdefault(ring, []).append(i)
    assert len(by_ring) == (1 if mode == "gkt" else 2) and min(map(len, by_ring.values())) > 1, by_ring
    for same in by_ring.values():
        assert_one_key(lambda launch, i: states(launch, delta_rule_hopper, mode, i), same)


@pytest.mark.parametrize("kernels", [delta_rule, delta_rule_hopper])
def test_the_control_of_the_delta_rule_has_several_keys(kernels: Any) -> None:
    """The size of a head is a size of the model."""
    with pytest.raises(AssertionError):
        assert_one_key(lambda launch, K: states(launch, kernels, "kht", 3, K), (64, 128))


def test_the_control_of_the_above_has_several_keys() -> None:
    """Sizes of the model are specialised: vectors are read by what divides them."""

    def record(launch: Recorder, K: int) -> None:
        products.product(empty(1, 33, K, dtype=BF16), empty(1, 512, K, dtype=BF16).mT, None, BF16, launch)

    with pytest.raises(AssertionError):
        assert_one_key(record, (512, 511))
