"""Inputs of the proof: sequences at different places, and the tokens that brought them there."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isobit.ops.gated_delta_rule_step.op import gated_delta_rule_step
from isobit.ops.gated_delta_rule_step.state import DeltaState
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, InputOptions

F32 = torch.float32
BY_TOKEN = ("q", "k", "v", "g", "beta")


class Prompted(DeltaState):
    """A state that keeps the tokens that it was given, for the truth: by slot, tensors [1, tokens, ...]; and
    its counts after them."""

    prompts: dict[int, Args]
    begun: Tensor

    @staticmethod
    def of(state: DeltaState, prompts: dict[int, Args]) -> "Prompted":
        made = object.__new__(Prompted)
        vars(made).update(vars(state))
        made.prompts, made.begun = prompts, state.place.clone()
        return made

    def clone(self) -> "Prompted":
        return Prompted.of(super().clone(), self.prompts)


def numbers(text: str) -> list[int]:
    """`62+5+0`."""
    return [int(n) for n in text.split("+")]


def tokens_of(case: Case, B: int, T: int, gen: torch.Generator, device: torch.device) -> Args:
    """Tokens as in a model: unit keys and queries, beta from 0 to 1, decaying gates. `mode` has a letter for
    each: g, n (use_qk_l2norm_in_kernel: q and k have other lengths), c (two large terms of q S cancel, so
    that few outputs show an order of the sum)."""
    d, given = case.dims, case.options.get("mode", "g")
    H, HV, K, V = d["H"], d["HV"], d["K"], d["V"]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=gen.device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=gen, device=gen.device)

    q, k = (torch.nn.functional.normalize(drawn(B, T, H, K), dim=-1) for _ in range(2))
    if "n" in given:
        q, k = q * 5.0, k * (uniform(B, T, H, 1) + 0.5)
    if "c" in given:
        q[..., 48] = q[..., 0]
        k[..., 0] = k[..., 48] = 0.0
    args: Args = {n: t.to(device, case.dtype) for n, t in (("q", q), ("k", k), ("v", drawn(B, T, HV, V)))}
    gates, beta = (uniform(B, T, HV) / -8).to(device), uniform(B, T, HV).to(device)
    return args | {"g": gates if "g" in given else None, "beta": beta}


def options_of(case: Case) -> Args:
    return {"scale": 0.3, "use_qk_l2norm_in_kernel": "n" in case.options.get("mode", "g")}


@lru_cache(maxsize=32)
def _prompted(case: "_Hashed", device: torch.device, seed: int, backend: str | None) -> Prompted:
    """A state with a prompt in each of its slots, one slot more than sequences, as a backend stores it. Kept,
    because it takes longer than the calls of the laws."""
    own, d = case.case, case.case.dims
    gen = torch.Generator().manual_seed(seed + 1)
    places = [own.options.get("at", 3)] * max(d["B"], 1)
    if "prompts" in own.options:
        places = numbers(own.options["prompts"])
    state = DeltaState(
        len(places) + 1, d["H"], d["HV"], K=d["K"], V=d["V"], dtype=own.dtype, device=device,
        drafts=bool(own.options.get("drafts")),
    )  # fmt: skip
    for t in state.tensors().values():
        if t.is_floating_point():
            t.fill_(float("nan"))  # what is stored in rows that do not exist must not matter
    initial = torch.randn(state.slots, *state.start.shape[2:], generator=gen).to(device)
    if "c" in own.options.get("mode", ""):
        initial[..., 0, :] += 1000.0
        initial[..., 48, :] -= 1000.0
    if own.options.get("seeded"):
        state.reset(None, initial)
    longest = max(places, default=0)
    prompt = tokens_of(own, len(places), longest, gen, device)
    lengths = torch.tensor(places, dtype=torch.int32, device=device)
    if longest:
        gated_delta_rule_step(state, **prompt, **options_of(own), lengths=lengths, backend=backend)
    prompts = {}
    for slot, n in enumerate(places):
        cut = {name: None if t is None else t[slot : slot + 1, :n] for name, t in prompt.items()}
        prompts[slot] = cut | {
            "initial_state": initial[slot : slot + 1] if own.options.get("seeded") else None
        }
    return Prompted.of(state, prompts)


class _Hashed:
    """A case as a key."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __hash__(self) -> int:
        return hash(self.case.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.case.name == other.case.name


def backend_for(backend: str, device: torch.device) -> str | None:
    """Who computes what a backend is compared with, and what it goes on from: one with its arithmetic. The
    model is of the same class as kernels in the interpreter, and quicker; on a GPU the kernels compute."""
    return "model" if backend == "model" or device.type == "cpu" else None


def make(case: Case, device: torch.device, options: InputOptions, backend: str = "triton") -> Args:
    """`prompts` and `lengths`, as 62+5+0: how many tokens each slot has, and how many new ones each sequence
    gets; `at` is one number for all slots. Sequences of `prompts` are in the slots in descending order, and
    the last slot is not used."""
    d = case.dims
    gen = torch.Generator().manual_seed(options.seed)
    begun = _prompted(_Hashed(case), device, options.seed, backend_for(backend, device))
    args: Args = {"state": begun.clone()}
    args |= tokens_of(case, d["B"], d["T"], gen, device) | options_of(case)
    args["slots"] = args["lengths"] = None
    if "prompts" in case.options:
        args["slots"] = torch.arange(d["B"] - 1, -1, -1, dtype=torch.int32, device=device)
    if "lengths" in case.options:
        args["lengths"] = torch.tensor(numbers(case.options["lengths"]), device=device)
    return alter.laid_out_some(args, BY_TOKEN[:3], case.layout)


def slots_of(args: Args) -> list[int]:
    B: int = args["q"].shape[0]
    return list(range(B)) if args["slots"] is None else args["slots"].tolist()


def lengths_of(args: Args) -> list[int]:
    B, T = args["q"].shape[:2]
    return [T] * B if args["lengths"] is None else args["lengths"].tolist()


def histories(args: Args) -> list[tuple[Args, int] | None]:
    """For each sequence: arguments of `gated_delta_rule` for all its tokens, the new ones at the end, and the
    number of tokens before these; None if it has no slot or no new token."""
    result: list[tuple[Args, int] | None] = []
    for b, (slot, n) in enumerate(zip(slots_of(args), lengths_of(args), strict=True)):
        prompt = args["state"].prompts.get(slot)
        if prompt is None or n == 0:
            result.append(None)
            continue
        whole: dict[str, Any] = {"scale": args["scale"], "cu_seqlens": None, "state_v_first": False}
        whole["use_qk_l2norm_in_kernel"] = args["use_qk_l2norm_in_kernel"]
        for name in BY_TOKEN:
            new = None if args[name] is None else args[name][b : b + 1, :n]
            whole[name] = None if new is None else torch.cat((prompt[name].to(new.dtype), new), 1)
        initial = prompt["initial_state"]
        whole["initial_state"] = None if initial is None else initial.to(args["beta"].dtype)
        result.append((whole, prompt["q"].shape[1]))
    return result


def features_regrouped(args: Args) -> Args:
    """Groups of 16 features in another order: the same products, summed in another order."""
    state = args["state"].clone()
    state.k_rows.copy_(alter.in_other_groups(state.k_rows, -1))
    for t in (state.start, state.start16):
        t.copy_(alter.in_other_groups(t, -2))
    return args | {"state": state} | {n: alter.in_other_groups(args[n], -1) for n in ("q", "k")}
