"""Inputs of the proofs, and changes of them."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from isobit.ops.delta_rule.proof.packings import lengths_of
from isobit.ops.gated_delta_rule.model import CHUNK
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, InputOptions

F32, NAN = torch.float32, float("nan")
BY_TOKEN = ("q", "k", "v", "g", "beta")
OF_STATES = ("k", "w", "u", "g", "gk")


def _drawn(case: Case, device: torch.device, options: InputOptions) -> Any:
    """Large random inputs are drawn on the device itself."""
    where = device if case.heavy or case.data == "random" else torch.device("cpu")
    return torch.Generator(where).manual_seed(options.seed)


def _bounds(case: Case, device: torch.device) -> Tensor | None:
    lengths = case.options.get("lengths")
    if not lengths:
        return None
    return torch.tensor([0, *accumulate(lengths_of(lengths))], dtype=torch.int32, device=device)


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Inputs as in a model: unit keys and queries, beta from 0 to 1, decaying gates. `mode` has a letter for
    each tensor and flag: g, h (initial_state), n (use_qk_l2norm_in_kernel: q and k have other lengths); it is
    "-" where there is none of them."""
    d, given = case.dims, case.options.get("mode", "gh")
    B, T, H, HV, K, V = d["B"], d["T"], d["H"], d["HV"], d["K"], d["V"]
    gen, wide = _drawn(case, device, options), torch.promote_types(case.dtype, F32)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=gen.device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=gen, device=gen.device)

    q, k = (torch.nn.functional.normalize(drawn(B, T, H, K), dim=-1) for _ in range(2))
    if "n" in given:
        q, k = q * 5.0, k * (uniform(B, T, H, 1) + 0.5)
    args: Args = {n: t.to(device, case.dtype) for n, t in (("q", q), ("k", k), ("v", drawn(B, T, HV, V)))}
    args["g"] = (uniform(B, T, HV) / -8).to(device, wide) if "g" in given else None
    args["beta"] = uniform(B, T, HV).to(device, wide)
    bounds, v_first = _bounds(case, device), bool(case.options.get("v_first"))
    S = B if bounds is None else len(bounds) - 1
    state = (S, HV, V, K) if v_first else (S, HV, K, V)
    args["initial_state"] = drawn(*state).to(device, wide) if "h" in given else None
    args |= {"scale": 0.3, "use_qk_l2norm_in_kernel": "n" in given, "state_v_first": v_first}
    args["cu_seqlens"] = bounds
    return alter.laid_out_some(args, BY_TOKEN[:3], case.layout)


def make_states(case: Case, device: torch.device, options: InputOptions) -> Args:
    """The same for `chunk_gated_delta_rule_fwd_h`; `mode` has k (gk) too."""
    d, given = case.dims, case.options.get("mode", "gh")
    B, T, H, HV, K, V = d["B"], d["T"], d["H"], d["HV"], d["K"], d["V"]
    gen, wide = _drawn(case, device, options), torch.promote_types(case.dtype, F32)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=gen.device)

    def gate(*shape: int) -> Tensor | None:
        """Random log2 decays: they need not be sums."""
        return (torch.rand(*shape, generator=gen, device=gen.device) * -4.0).to(device, wide)

    k = torch.nn.functional.normalize(drawn(B, T, H, K), dim=-1)
    w = k.repeat_interleave(HV // H, 2) * torch.rand(B, T, HV, 1, generator=gen, device=gen.device)
    args: Args = {n: t.to(device, case.dtype) for n, t in (("k", k), ("w", w), ("u", drawn(B, T, HV, V)))}
    bounds, v_first = _bounds(case, device), bool(case.options.get("v_first"))
    S = B if bounds is None else len(bounds) - 1
    state = (S, HV, V, K) if v_first else (S, HV, K, V)
    args["g"] = gate(B, T, HV) if "g" in given else None
    args["gk"] = gate(B, T, HV, K) if "k" in given else None
    args["initial_state"] = drawn(*state).to(device, wide) if "h" in given else None
    args |= {"chunk_size": CHUNK, "state_v_first": v_first, "cu_seqlens": bounds}
    args |= {"chunk_indices": None, "chunk_offsets": None}
    if bounds is not None:
        each = [-(-n // CHUNK) for n in lengths_of(case.options["lengths"])]
        indices = [[s, c] for s, n in enumerate(each) for c in range(n)]
        args["chunk_indices"] = torch.tensor(indices, dtype=torch.int32, device=device).view(-1, 2)
    return alter.laid_out_some(args, OF_STATES[:3], case.layout)


def padding(args: Args, rows: int) -> Args:
    """Sequences of NaN to append; they must change nothing."""
    names = [n for n in (*BY_TOKEN, *OF_STATES, "initial_state") if n in args]
    return {n: None if args[n] is None else args[n].new_full((rows, *args[n].shape[1:]), NAN) for n in names}


def features_regrouped(args: Args) -> Args:
    """Groups of 16 features in another order: the same products, summed in another order."""
    axis = -1 if args["state_v_first"] else -2
    names = [n for n in ("q", "k", "w", "gk") if args.get(n) is not None]
    changed = {n: alter.in_other_groups(args[n], -1) for n in names}
    if args["initial_state"] is not None:
        changed["initial_state"] = alter.in_other_groups(args["initial_state"], axis)
    return args | changed


def _in_first_groups(t: Tensor, axis: int) -> Tensor:
    """Undoes `in_other_groups`: the last group of 16 comes first again."""
    return t.roll(16, axis)


def features_back(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Undoes it for a last state [K, V]."""
    o, final_state = outputs
    return o, _in_first_groups(final_state, -2)


def states_back(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Undoes it for states [K, V]."""
    h, v_new, final_state = outputs
    return _in_first_groups(h, -2), v_new, _in_first_groups(final_state, -2)


def part(args: Args, first: int, end: int, state: Tensor | None) -> Args:
    """Tokens [first, end) of each sequence of a batch."""
    names = [n for n in BY_TOKEN if args[n] is not None]
    return args | {n: args[n][:, first:end] for n in names} | {"initial_state": state}


def one_of_packed(args: Args, s: int, first: int, end: int, names: tuple[str, ...]) -> Args:
    """One of packed sequences, as a batch of one."""
    result = args | {n: args[n][:, first:end] for n in names if args[n] is not None}
    if args["initial_state"] is not None:
        result["initial_state"] = args["initial_state"][s : s + 1]
    none = {n: None for n in ("cu_seqlens", "chunk_indices", "chunk_offsets") if n in args}
    return result | none
