"""What `enable` is asked for, as a text for the environment of worker processes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from isobit.frame.contract import ContractError
from isobit.integrations.rounding import ROUNDINGS, Rounding
from isobit.integrations.vllm.scores import DTYPES, KINDS
from isobit.integrations.vllm.versions import refusal
from isobit.layers.classes import Classes, as_map, check_class

#: Set by `enable` for the worker processes of an engine, which load isobit's plugin. It changes no number in
#: isobit. Its value is 1, or 1 and the options: "1,allow_others,logprobs=log_softmax".
VARIABLE = "ISOBIT_VLLM"


@dataclass(frozen=True)
class Options:
    allow_untested: bool = False
    allow_others: bool = False
    logprobs: str = KINDS[0]
    logits_dtype: str = "float32"
    warm_up: bool = False
    rounding: Rounding = ROUNDINGS[0]
    numerics: str = ""  # the map of classes, as JSON with what separates options quoted

    @property
    def classes(self) -> dict[str, str]:
        """Numerics classes by the name of a layer in transformers, or by a pattern of names."""
        return dict(json.loads(unquote(self.numerics))) if self.numerics else {}

    def text(self) -> str:
        """For the variable: those that are not the default."""
        given = [(name, value) for name, value in vars(self).items() if value != getattr(Options, name)]
        return ",".join(["1", *(name if value is True else f"{name}={value}" for name, value in given)])

    @classmethod
    def read(cls, text: str) -> "Options":
        first, *given = text.split(",")
        options: dict[str, Any] = {}
        for each in given:
            name, equals, value = each.partition("=")
            options[name] = value if equals else True
        defaults = vars(cls())
        known = all(type(value) is type(defaults.get(name)) for name, value in options.items())
        read = defaults | options
        known &= read["logprobs"] in KINDS and read["logits_dtype"] in DTYPES.values()
        known &= read["rounding"] in ROUNDINGS
        if first != "1" or not known or not _is_map(read["numerics"]):
            raise refusal(f"{VARIABLE}={text!r} is not what enable() sets; unset it, and call enable()")
        return cls(**options)


def quoted(what: str, numerics: Classes) -> str:
    """A map of classes, or one class for all layers, as `Options.numerics`."""
    if numerics is None or numerics == {}:
        return ""
    given = as_map(numerics)
    for key, each in given.items():
        if not isinstance(key, str):
            raise ContractError(f"{what}(numerics: {key!r}): a key is the name of a layer")
        check_class(what, each)
    return quote(json.dumps(dict(sorted(given.items())), separators=(",", ":")), safe="*:.{}")


def _is_map(text: str) -> bool:
    if not text:
        return True
    try:
        given = json.loads(unquote(text))
    except ValueError:
        return False
    return isinstance(given, Mapping) and all(isinstance(each, str) for each in given.values())
