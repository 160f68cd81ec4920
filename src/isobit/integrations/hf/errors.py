"""Errors for models that isobit cannot serve."""

from isobit.frame.backend import UnsupportedError


class HFError(UnsupportedError):
    """isobit cannot serve this model, or this call of it. The message says what and why."""
