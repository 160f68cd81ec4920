"""isobit inside other libraries: one module per library, and nothing happens until its `enable()` is called.

Importing these modules imports none of the libraries.
"""

from isobit.integrations import fla, hf, trl, verl

__all__ = ["fla", "hf", "trl", "verl"]
