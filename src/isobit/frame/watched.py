"""Whether somebody must see every call."""

import torch

_dispatch_modes, _tracing_state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_transform = torch._C._functorch.peek_interpreter_stack


def is_watched() -> bool:
    """Whether a dispatch mode, a trace or a transform is active, which must see every call."""
    return _dispatch_modes() > 0 or _tracing_state() is not None or _transform() is not None
