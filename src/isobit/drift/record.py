"""What goes into each module of a model and what comes out, for the tokens of one sequence.

Hooks on all modules see every call. An attention module is more than one step: what it hands to its attention
function, and what comes back, is seen too, in any model that uses transformers' AttentionInterface. The
inputs of attention for a token are its query and all keys and values that it reads, those from a cache
included.

Tensors are not kept: `Trace` has a digest of each token's inputs and outputs (`bits`).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from isobit.drift import bits
from isobit.drift.calls import Call, Piece

#: A module, and how often it was called before in the same forward.
Key = tuple[str, int]

#: Ends the name of the attention function of a module.
ATTENTION = ":attention"


def kind_of(module: nn.Module) -> str:
    """What a module without children computes, by its class."""
    name = type(module).__name__.lower()
    if _is_quantised(module):
        return "quantised"
    if "router" in name:
        return "router"
    gpt2_linear = name == "conv1d" and hasattr(module, "nf")
    if isinstance(module, nn.Linear) or name.endswith("linear") or gpt2_linear:
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if "rotary" in name or "rope" in name:
        return "rope"
    if "norm" in name:
        return "layer norm" if isinstance(module, nn.LayerNorm) else "norm"
    if "dropout" in name or isinstance(module, nn.Identity):
        return "identity"
    if type(module).__module__ == "torch.nn.modules.activation" or "activation" in name or "elu" in name:
        return "activation"
    return "other"


def _is_quantised(module: nn.Module) -> bool:
    """Whether its weight is of integers, or of floating-point numbers of 8 bits."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(x.ndim >= 2 and (not x.is_floating_point() or x.element_size() == 1) for x in tensors)


#: Kinds that compute each token from that token alone. Others may read those before it.
TOKEN_BY_TOKEN = (
    "linear", "router", "embedding", "rope", "norm", "layer norm", "quantised", "identity", "activation",
    "attention",
)  # fmt: skip


@dataclass
class Event:
    """A module in every forward of a plan: digests of its inputs and outputs [T], by position. `children` are
    the modules that it called, in their order. `bytes` is the size of what it reads and writes, `parts` the
    numbers of tensors of tokens among them, in every forward."""

    kind: str  # "module" if it calls others
    inputs: Tensor
    outputs: Tensor
    children: list[Key] = field(default_factory=list)
    bytes: int = 0
    parts: set[tuple[str, int]] = field(default_factory=set)

    def note(self, what: str, given: "Digested") -> None:
        self.bytes += given.bytes
        self.parts.add((what, given.parts))


@dataclass(frozen=True)
class Digested:
    """[count] digests of some tensors, their number and their size."""

    digests: Tensor
    parts: int
    bytes: int


class Trace:
    """The events of one sequence, in the order of their first call."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.events: dict[Key, Event] = {}

    def event(self, key: Key, kind: str) -> Event:
        if key not in self.events:
            inputs = torch.zeros(self.length, dtype=torch.int64)
            self.events[key] = Event(kind, inputs, inputs.clone())
        return self.events[key]


class Watcher:
    """What a recording does with the calls of modules: `before` and `after` each, by key. The tokens of the
    sequence are those of `piece`; nothing is called in forwards without them."""

    def before(self, key: Key, kind: str, parent: Key | None, args: "Arguments") -> None: ...

    def after(
        self, key: Key, kind: str, args: "Arguments", output: Any, again: Callable[..., Any]
    ) -> None: ...


@dataclass(frozen=True)
class Arguments:
    """Arguments of a module, or of an attention function, in one forward, and where the tokens are."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Call
    piece: Piece

    def keys_from(self, keys: int) -> int:
        """The column of the first token in the keys of an attention function. A cache with a window has
        dropped the oldest columns; then this is negative."""
        first = self.call.past + self.piece.column - self.piece.first
        dropped = max(0, self.call.past + self.call.ids.shape[1] - keys)
        return first - dropped

    def first_read(self) -> Tensor:
        """[count] the position of the first key that each token reads."""
        at = torch.arange(self.piece.first, self.piece.first + self.piece.count)
        window = self.kwargs.get("sliding_window")
        return (at - window + 1).clamp(min=0) if window else torch.zeros_like(at)


def token_rows(x: Tensor, call: Call, piece: Piece) -> Tensor | None:
    """[count, ...] of the piece's tokens, a view; None if this tensor is not one of tokens: [B, T, ...],
    [B, H, T, D] with heads in front, or [B * T, ...]."""
    B, T = call.ids.shape
    if x.ndim >= 2 and x.shape[0] in (B, 1):
        # With as many heads as tokens, the tokens are farther apart in memory: heads are views of rows.
        heads_first = x.ndim == 4 and x.shape[2] == T and (x.shape[1] != T or x.stride(1) < x.stride(2))
        if heads_first:
            x = x.transpose(1, 2)
        if x.shape[1] == T:
            return x[piece.line if x.shape[0] == B else 0, piece.columns]
    if x.shape[:1] == (B * T,) and (x.ndim == 2 or (x.ndim == 3 and B * T > 1)):
        return x[piece.line * T + piece.column :][: piece.count]
    return None


def tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in arguments or outputs but masks, with the name of the argument."""
    if isinstance(tree, Tensor):
        if "mask" not in name and tree.dtype != torch.bool:
            yield name, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors(value, str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors(value, name)


def digests(kind: str, trees: Any, args: Arguments, integers: bool = False) -> Digested:
    """Of the tokens in some tensors: the floating-point ones, or the others. A module that calls others may
    return the weights of its attention, [B, H, T, keys]: these are no numbers of a token alone."""
    piece, parts, size = args.piece, [], 0
    for _, x in tensors(trees):
        weights = kind == "module" and x.ndim > 3
        rows = None if weights or x.is_floating_point() == integers else token_rows(x, args.call, piece)
        if rows is not None:
            parts.append(bits.of_rows(rows))
            size += rows.numel() * rows.element_size()
    return Digested(bits.combined(parts, piece.count), len(parts), size)


class Digests(Watcher):
    """Fills a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def before(self, key: Key, kind: str, parent: Key | None, args: Arguments) -> None:
        event = self.trace.event(key, kind)
        if parent is not None and key not in (children := self.trace.events[parent].children):
            children.append(key)
        if kind == "attention":
            given = self._of_attention(args)
        else:
            # An embedding is of ids, and a rotary embedding of positions: it takes hidden states for their
            # dtype only.
            given = digests(kind, (args.args, args.kwargs), args, integers=kind in ("embedding", "rope"))
        event.inputs[args.piece.positions] = given.digests
        event.note("inputs", given)

    def after(self, key: Key, kind: str, args: Arguments, output: Any, again: Callable[..., Any]) -> None:
        event = self.trace.events[key]
        given = digests(kind, output[:1] if kind == "attention" else output, args)
        event.outputs[args.piece.positions] = given.digests
        event.note("outputs", given)

    @staticmethod
    def _of_attention(args: Arguments) -> Digested:
        q, k, v = args.args[:3]
        line, end = args.piece.line, args.piece.first + args.piece.count
        parts, size = [bits.of_rows(q[line, :, args.piece.columns].transpose(0, 1))], q.nbytes // len(q)
        for x in (k, v):
            column = args.keys_from(x.shape[2])
            there = x[line, :, max(0, column) : column + end].transpose(0, 1)  # in the order of positions
            dropped = torch.zeros(end - len(there), dtype=torch.int64)
            all_keys = torch.cat((dropped, bits.of_rows(there)))
            first = torch.zeros(end, dtype=torch.int64)
            first[args.piece.first :] = args.first_read()
            parts.append(bits.of_prefixes(all_keys, first)[args.piece.first :])
            size += x.nbytes // len(x)
        return Digested(bits.combined(parts, args.piece.count), len(parts), size)


@dataclass
class Recording:
    """Hooks on a model that tell a watcher about one sequence. `begin` must be called before each forward."""

    model: nn.Module
    sequence: int
    watcher: Watcher
    call: Call | None = None
    piece: Piece | None = None
    stack: list[tuple[Key, Arguments]] = field(default_factory=list)
    count: Counter[str] = field(default_factory=Counter)

    def begin(self, call: Call) -> None:
        self.call = call
        self.piece = next((piece for piece in call.pieces if piece.sequence == self.sequence), None)
        self.stack.clear()
        self.count.clear()

    @contextmanager
    def on(self) -> Iterator["Recording"]:
        with ExitStack() as stack:
            self.names = {id(module): name for name, module in self.model.named_modules()}
            for name, module in self.model.named_modules():
                kind = "module" if [*module.children()] else kind_of(module)
                hooks = (
                    module.register_forward_pre_hook(self._entered(name, kind), with_kwargs=True),
                    module.register_forward_hook(self._left(kind), with_kwargs=True),
                )
                for hook in hooks:
                    stack.callback(hook.remove)
            stack.enter_context(self._attention())
            yield self

    def _enter(self, name: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if self.piece is None or self.call is None:
            return None
        key = (name, self.count[name])
        self.count[name] += 1
        parent = self.stack[-1][0] if self.stack else None
        given = Arguments(args, kwargs, self.call, self.piece)
        self.watcher.before(key, kind, parent, given)
        self.stack.append((key, given))
        return given

    def _entered(self, name: str, kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._enter(name, kind, args, kwargs)

        return hook

    def _left(self, kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self.piece is not None:
                key, given = self.stack.pop()
                self.watcher.after(key, kind, given, output, module.forward)

        return hook

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """The functions that transformers' AttentionInterface returns are seen, too."""
        try:
            interface = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        except (ImportError, AttributeError):
            yield
            return
        theirs = interface.get_interface

        def get_interface(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            return self._seen(theirs(*args, **kwargs))

        interface.get_interface = get_interface
        try:
            yield
        finally:
            del interface.get_interface

    def _seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            name = self.names.get(id(module))
            given = None
            if name is not None:
                given = self._enter(name + ATTENTION, "attention", (q, k, v, *args), kwargs)
            output = function(module, q, k, v, *args, **kwargs)
            if given is not None:
                key, _ = self.stack.pop()
                self.watcher.after(
                    key, "attention", given, output, lambda *a, **kw: function(module, *a, **kw)
                )
            return output

        return attend
