"""What isobit says where it cannot serve transformers."""

from isobit.backend import UnsupportedError


class HFError(UnsupportedError):
    """This model, or this call of it, is nothing that isobit can serve. The message says what and why."""
