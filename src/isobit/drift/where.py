"""Where a difference begins: the first module whose outputs differ although its inputs are equal.

Two plans compute the same sequence. For every module and token there are four cases:

    inputs equal, outputs equal      nothing happened
    inputs equal, outputs differ     it ADDS a difference
    inputs differ, outputs differ    it inherits one, and may add another
    inputs differ, outputs equal     it hides one, for example by rounding

What a module that calls others computes itself (a rotation of queries, a residual sum, a product of gate and
up) is judged between them: all that it had before was equal, and what it hands on is not. Here a token is
compared only if all tokens before it were equal, because such code may read them.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isobit.drift.calls import Plan, Run
from isobit.drift.record import ATTENTION, TOKEN_BY_TOKEN, Digests, Event, Key, Recording, Trace

#: States of a layer and a token in the heat map.
EQUAL, INHERITED, ADDED = 0, 1, 2

#: What names of own code have behind the name of their module, and the name of the whole model there.
OWN, WHOLE = ", its own code", "the model"


@dataclass
class Found:
    """A module in both plans. `adds` has the positions of tokens whose inputs are equal and outputs are not.

    `added` and `differs` are set by a replay, relative to the largest output: how much the outputs differ if
    it gets the other side's inputs, and how much they differed in the run. `adds_replayed` has the tokens
    whose outputs differ then: unlike `adds`, also those whose inputs differed in the run."""

    name: str
    kind: str
    tokens: int
    inputs_equal: int
    outputs_equal: int
    adds: list[int] = field(default_factory=list)
    adds_replayed: list[int] = field(default_factory=list)
    added: float | None = None
    differs: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "tokens": self.tokens,
            "inputs_equal": self.inputs_equal,
            "outputs_equal": self.outputs_equal,
            "adds": len(self.adds),
            "adds_replayed": len(self.adds_replayed),
            "first_position": min(self.adds) if self.adds else None,
            "added": self.added,
            "differs": self.differs,
        }


@dataclass
class Where:
    """All modules in the order of their calls, and the heat map of layers and tokens."""

    sequence: int
    found: list[Found]
    layers: dict[str, Tensor]  # of each layer whether its outputs are equal, by position
    by_key: dict[Key, Found]

    @property
    def adding(self) -> list[Found]:
        """Modules that add, in the order of their calls: to equal inputs, or in a replay."""
        return [each for each in self.found if each.adds or each.adds_replayed]

    @property
    def first(self) -> Found | None:
        """The first one that adds to equal inputs: where the difference begins."""
        return next((each for each in self.found if each.adds), None)

    @property
    def heat(self) -> list[list[int]]:
        """For each layer and token: equal, different, or made different by a module of this layer."""
        lines = {layer: torch.where(equal, EQUAL, INHERITED) for layer, equal in self.layers.items()}
        for each in self.adding:
            layer = layer_of(each.name.partition(",")[0])
            if layer in lines:
                lines[layer][sorted({*each.adds, *each.adds_replayed})] = ADDED
        return [line.tolist() for line in lines.values()]

    def to_json(self) -> dict[str, Any]:
        return {
            "sequence": self.sequence,
            "first": self.first.to_json() if self.first else None,
            "modules": [each.to_json() for each in self.found],
            "layers": list(self.layers),
            "heat": ["".join(map(str, line)) for line in self.heat],
        }


def layer_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj`; the name itself outside layers."""
    layer = re.match(r"(.*?\.\d+)(\.|:|$)", name)
    return layer[1] if layer else name


def traced(run: Run, plan: Plan, sequence: int, length: int) -> Trace:
    trace = Trace(length)
    recording = Recording(run.model, sequence, Digests(trace))
    with recording.on():
        for _ in Run(run.model, run.device, recording.begin).logits(plan):
            pass
    return trace


def compared(a: Trace, b: Trace, sequence: int) -> Where:
    # A module whose tensors of tokens are recognised in one plan and not in the other cannot be compared.
    both = {
        key: Both(a.events[key], event)
        for key, event in b.events.items()
        if key in a.events and a.events[key].parts == event.parts
    }
    found, by_key = [], {}
    for key, each in both.items():
        if each.kind == "module":
            found += _own_code(_name(key), each, both)
        else:
            by_key[key] = _found(
                _name(key), each.kind, each.inputs, each.outputs, each.kind in TOKEN_BY_TOKEN
            )
            found.append(by_key[key])
    order = {name: i for i, name in enumerate(_in_order(both))}
    found.sort(key=lambda one: order.get(one.name, len(order)))
    layers = {
        name: each.outputs
        for (name, count), each in both.items()
        if each.kind == "module" and not count and re.search(r"\.\d+$", name) and layer_of(name) == name
    }
    return Where(sequence, found, layers, by_key)


class Both:
    """An event of both plans: whether inputs and outputs have equal digests, by position."""

    def __init__(self, a: Event, b: Event) -> None:
        self.kind, self.children = b.kind, b.children
        self.inputs, self.outputs = a.inputs == b.inputs, a.outputs == b.outputs


def _name(key: Key) -> str:
    return key[0] + (f" (call {key[1] + 1})" if key[1] else "")


def _in_order(both: dict[Key, Both]) -> list[str]:
    """Names in the order in which things are computed. Own code of a module is named after what follows it,
    and at the end after the module."""
    names: list[str] = []

    def visit(key: Key) -> None:
        each, name = both[key], _name(key)
        for child in each.children:
            if child in both:
                names.append(_before(name, child))
                visit(child)
        names.append(_at_the_end(name) if each.kind == "module" else name)

    called = {child for each in both.values() for child in each.children}
    for key in both:
        if key not in called:
            visit(key)
    return names


def _before(name: str, child: Key) -> str:
    last = "attention" if child[0].endswith(ATTENTION) else child[0].rpartition(".")[2]
    return f"{name or WHOLE}{OWN} before {last}"


def module_of(name: str) -> str:
    """The name of the module that a name in a report is of: `model.layers.0.self_attn` of
    `model.layers.0.self_attn:attention` and of `model.layers.0.self_attn, its own code at the end`."""
    name = name.partition(OWN)[0].removesuffix(ATTENTION)
    return "" if name == WHOLE else re.sub(r" \(call \d+\)$", "", name)


def _at_the_end(name: str) -> str:
    return f"{name or WHOLE}{OWN} at the end"


def _own_code(name: str, each: Both, both: dict[Key, Both]) -> list[Found]:
    """Differences that a module adds between the modules that it calls. Those that add nothing are left
    out."""
    judged = []
    equal = _so_far(each.inputs)
    for child in each.children:
        if child not in both:
            continue
        kind = "rope" if child[0].endswith(ATTENTION) else "own code"
        judged.append(_found(_before(name, child), kind, equal, both[child].inputs, True))
        equal = _so_far(equal & both[child].inputs & both[child].outputs)
    if each.children:
        judged.append(_found(_at_the_end(name), "own code", equal, each.outputs, True))
    return [one for one in judged if one.adds]


def _found(name: str, kind: str, inputs: Tensor, outputs: Tensor, token_by_token: bool) -> Found:
    comparable = inputs if token_by_token else _so_far(inputs)
    adds = (comparable & ~outputs).nonzero()[:, 0].tolist()
    return Found(name, kind, len(inputs), int(inputs.sum()), int(outputs.sum()), adds)


def _so_far(equal: Tensor) -> Tensor:
    """Whether a token and all before it are equal."""
    return equal.long().cumprod(0).bool()
