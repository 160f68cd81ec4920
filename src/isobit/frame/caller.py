"""Where the library was called from, so that a warning points at that line."""

import sys
import warnings
from pathlib import Path

import torch

#: Code between the user's line and the library's.
_INSIDE = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))


def warn(message: str) -> None:
    """Warn at the innermost line that is neither the library's nor PyTorch's."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
