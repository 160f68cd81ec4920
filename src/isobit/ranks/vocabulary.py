"""A vocabulary that ranks share: how functions of log-probabilities make the call of a rank, which all ranks
agree to make. What each computes, and what it exchanges, is its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import Explanation
from isobit.frame.contract import ContractError, describe
from isobit.kernels.host import tokens
from isobit.kernels.host.vocab_shards import SHARDS, padded
from isobit.ranks.agreement import agree, bits, reads_values
from isobit.ranks.group import Group
from isobit.ranks.shared import under_the_name

Given = dict[str, Any]

_CONTROLS = ("numerics", "backend")


@dataclass(frozen=True)
class Call:
    """A call of a rank that satisfies the contract."""

    group: Group
    args: Given  # with the vocabulary of all ranks
    backend: str

    @property
    def here(self) -> dict[str, int]:
        """Which shards this rank has."""
        count = SHARDS // self.group.size
        return {"shard": self.group.rank * count, "shards": count}

    def given(self, *names: str) -> Given:
        return {name: self.args[name] for name in names}


@dataclass(frozen=True)
class OfVocabulary:
    """A function whose vocabulary ranks share, by the arguments that a user gives it."""

    what: str
    #: The op that computes this rank's part, which has most of the contract: (a call, its controls) -> what
    #: serves it.
    part: str
    explain: Callable[[Call, Given], Explanation]
    #: What this rank has of DTensors, and the vocabulary that these tell.
    local: Callable[[Given], Given]
    #: How many tokens this rank has.
    tokens_here: Callable[[Given], int]
    #: What must be the same on all ranks, in words; and tensors whose bits must be, in live rows.
    said: Callable[[Given], str]
    alike: tuple[str, ...]
    #: The rules about values of tensors.
    check_values: Callable[[Given], None]

    def call_of(
        self, group: Group, given: Given, device: torch.device,
        also: Callable[[Given], None] = lambda args: None, values: Callable[[], Mapping[str, str]] = dict,
    ) -> Call:  # fmt: skip
        """The call of a rank, which all ranks agree to make. `also` checks more of it, and `values` are more
        checksums of tensors that must be equal."""
        args, checked = {name: value for name, value in given.items() if name != "validate"}, list[Call]()

        def said() -> str:
            args.update(self.local(given))
            args.update(self._vocabulary(args, group))
            return self.said(args)

        def check() -> str:
            also(args)
            checked.append(self._checked(group, args, given["validate"], device))
            return checked[0].backend

        def alike() -> dict[str, str]:
            """A rank with other tokens would merge states of other rows."""
            live = tokens.live_rows(args["token_ids"], args["mask"], args["ignore_index"])
            return bits({name: args[name] for name in self.alike}, live) | dict(values())

        agree(group, said, check, device, given["validate"], values=alike, each_time=True)
        return checked[0]

    def explained(self, group: Group, given: Given) -> Explanation:
        """What serves a call on this rank. Exchanges nothing."""
        args = given | self.local(given)
        return self._explained(group, args | self._vocabulary(args, group))

    def _explained(self, group: Group, args: Given) -> Explanation:
        controls = {name: args[name] for name in _CONTROLS}
        with under_the_name(self.what, self.part):
            return replace(self.explain(Call(group, args, ""), controls), op=self.what)

    def _vocabulary(self, given: Given, group: Group) -> dict[str, int]:
        """The tokens of all ranks, and the padded vocabulary."""
        V, P = given["vocab_size"], given["padded_vocab"]
        if V is None:
            V = group.size * self.tokens_here(given)
        return {"vocab_size": V, "padded_vocab": padded(V) if P is None else P}

    def _checked(self, group: Group, given: Given, validate: bool | None, device: torch.device) -> Call:
        """The call, if it satisfies the contract on this rank. Exchanges nothing."""
        served = self._explained(group, given)
        if served.backend is None:
            raise ContractError(f"{self.what}: no backend can serve this call with a group: {served}")
        each = given["temperature"]
        if isinstance(each, Tensor) and each.requires_grad:
            raise ContractError(
                f"{self.what}(temperature: {describe(each)}): no gradient goes to it; detach() it"
            )
        if reads_values(validate, device):
            self.check_values(given)
        args = {name: value for name, value in given.items() if name not in _CONTROLS}
        return Call(group, args, served.backend)
