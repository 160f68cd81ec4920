"""What transformers' cache keeps of a gated delta-net layer under `zero_drift`, and what can be done with it.

    conv_states[0]      [B, W - 1, D], the last inputs of the convolution
    recurrent_states    the tensors of a `DeltaState`, one after another

All of them have one row per sequence, so what transformers does with rows of a cache, it does with these too.
It has no code that crops such a layer, or selects rows of it: that is here. The layer of the cache gets this
class when its first token arrives, and stays the same object.

**Taking tokens back.** After `cache.activate_past_recording()` the state stores drafts, more inputs of the
convolution are kept, and `conv_states[1]` says which columns of the batch were tokens and which padding. So
`cache.crop(-n)` goes back over tokens that were passed since then, at most `BACK`. How many these are is
known on the host: nothing waits for the device.

This module imports transformers, and is imported when a layer meets a cache.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isobit.integrations.hf.errors import HFError
from isobit.ops.gated_delta_rule_step.state import CHUNK, TENSORS, DeltaState

#: How many of the last tokens can be taken back: a state with drafts stores at least so many rows.
BACK = CHUNK

#: transformers' own.
Plain: Any = import_module("transformers.cache_utils").LinearAttentionLayer


class DeltaLayer(Plain):
    """The layer of a cache. Attributes are those of transformers' class, and `recorded`."""

    conv_states: dict[int, Any]
    recurrent_states: dict[int, Any]
    recorded: int  # columns that can be taken back

    @property
    def has_begun(self) -> bool:
        return any(self.has_previous_state.values())

    def begin(self, state: DeltaState, inputs: Tensor) -> None:
        """Of sequences without a token yet: an empty state, and zeros."""
        every = range(len(TENSORS))
        self.number_of_states, self.dtype, self.device = len(every), inputs.dtype, inputs.device
        self.conv_states = dict.fromkeys(every)
        self.is_conv_states_initialized = {i: i == 0 for i in every}
        self.is_recurrent_states_initialized = dict.fromkeys(every, True)
        self.has_previous_state = dict.fromkeys(every, False)
        self.conv_states[0] = inputs
        self.state = state

    @property
    def state(self) -> DeltaState:
        return DeltaState.from_tensors({name: self.recurrent_states[i] for i, name in enumerate(TENSORS)})

    @state.setter
    def state(self, state: DeltaState) -> None:
        tensors = state.tensors()
        self.recurrent_states = {i: tensors[name] for i, name in enumerate(TENSORS)}

    # Taking tokens back

    @property
    def records(self) -> bool:
        return self.conv_states[1] is not None

    def record(self) -> None:
        """From here on."""
        if not self.state.drafts:
            self.state = self.state.with_drafts()
        inputs: Tensor = self.conv_states[0]
        self.conv_states[0] = torch.cat([inputs.new_zeros(len(inputs), BACK, inputs.shape[2]), inputs], 1)
        self.conv_states[1] = inputs.new_zeros(len(inputs), BACK, dtype=torch.bool)
        self.is_conv_states_initialized[1] = True
        self.recorded = 0

    def add(self, inputs: Tensor, lengths: Tensor | None, tokens: Tensor) -> None:
        """After a call with these inputs of the convolution, [B, T, D]: rows begin with their first token and
        have so many, or T. `tokens`: [B, columns] bool, which columns of the batch were tokens."""
        known: Tensor = self.conv_states[0]
        size, columns = known.shape[1], tokens.shape[1]
        every = torch.cat([known, inputs], 1)
        last = every[:, -size:] if lengths is None else _rows(every, lengths, size)
        self.conv_states[0] = last.contiguous()
        self.conv_states[1] = torch.cat([self.conv_states[1], tokens], 1)[:, -BACK:].contiguous()
        self.recorded = min(self.recorded + columns, BACK)

    @property
    def is_croppable(self) -> bool:
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Called by transformers' cache, with minus the number of columns."""
        if tokens_to_remove > 0:
            raise _error(tokens_to_remove, "give minus the number of tokens to take back")
        columns = -tokens_to_remove
        if columns == 0:
            return
        if not (self.has_begun and self.records):
            rule = "no token was recorded: call cache.activate_past_recording() before the tokens are passed"
            raise _error(tokens_to_remove, rule)
        if columns > self.recorded:
            rule = (
                f"{self.recorded} can be taken back: those passed since cache.activate_past_recording() and "
                f"not taken back yet, {BACK} at most"
            )
            raise _error(tokens_to_remove, rule)
        known, tokens = self.conv_states[0], self.conv_states[1]
        rows = tokens[:, BACK - columns :].sum(1)
        self.state.crop(rows)
        # Those that come in from the left are in front of all that can be reached.
        self.conv_states[0] = _rows(known, -rows, known.shape[1])
        self.conv_states[1] = torch.cat([torch.zeros_like(tokens[:, :columns]), tokens[:, :-columns]], 1)
        self.recorded -= columns

    # Rows

    def _replace(self, of: Any) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for i, t in states.items():
                states[i] = None if t is None else of(t)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these sequences, as for layers of attention."""
        self._replace(lambda t: t[indices, ...])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence so many times, as for layers of attention."""
        self._replace(lambda t: t.repeat_interleave(repeats, dim=0))


def _rows(x: Tensor, first: Tensor, size: int) -> Tensor:
    """[B, size, D]: of each row of x so many elements from this one on; in front of the row, its first."""
    index = (first[:, None] + torch.arange(size, device=x.device)).clamp(min=0)
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def _error(given: int, rule: str) -> HFError:
    where = f"crop({given}) of the cache of a gated delta-net layer"
    return HFError(f"isobit.integrations.hf.zero_drift: {where}: {rule}")


def layer_of(layer: Any, begun: bool) -> DeltaLayer | None:
    """The layer of a cache, which gets the class above; None if it is of another kind, or has begun so."""
    if type(layer) is Plain and not begun:
        layer.__class__ = DeltaLayer
    return layer if isinstance(layer, DeltaLayer) else None
