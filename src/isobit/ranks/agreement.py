"""All ranks of a group make the same call, or every one of them raises an error that says how they differ.

A rank that passes another option would wait for others that never come, or give them numbers of another
class. So before a call exchanges anything, ranks exchange a hash of what they are about to do: 8 bytes each.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from isobit.frame.call_plan import validates
from isobit.frame.contract import ContractError, describe, dtype_name
from isobit.ranks.checksum import checksum
from isobit.ranks.group import Group, RanksError

#: Bytes of a description that others are shown.
_SHOWN = 1024

#: What ranks have agreed about, by group.
_agreed: "WeakKeyDictionary[Any, set[bytes]]" = WeakKeyDictionary()


def agree(
    group: Group, call: Callable[[], str], check: Callable[[], str | None], device: torch.device,
    validate: bool | None = None, *, values: Callable[[], Mapping[str, str]] = dict, each_time: bool = False,
) -> None:  # fmt: skip
    """Every rank raises an error if `call` or `check` raises one on any of them, of whatever kind, or if what
    they return is not the same on all. Neither exchanges anything.

    `call` describes what a rank is about to compute. `check` is everything that may be wrong with it, and
    returns what serves the call here: a rank without a fast backend must not join others that have one.
    `values` are checksums of tensors that must be equal, by name.

    With validate=None that is done in every call on CPU tensors and with ISOBIT_VALIDATE=1, elsewhere at the
    first call of its kind: reading the answer is a host sync. validate=True does it in every call, and
    validate=False in none. In a CUDA graph that is being captured nothing is exchanged. With each_time
    `check` runs nevertheless; then an error of it is this rank's own, and what serves is part of the kind.

    What ranks have agreed about is the same set on all of them, since they add to it together. If later one
    of them makes another call than the others, nothing notices it. If its call is new, it waits with its hash
    for ranks that exchange tensors. If both calls are known, tensors of two calls meet: that is a hang, or
    wrong numbers where their sizes in bytes are equal.
    """
    known = _agreed.setdefault(getattr(group, "group", group), set())
    possible = validate is not False and not (
        device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    )
    always = possible and reads_values(validate, device)
    asks, error, kinds = always or (possible and not known), None, list[str]()
    try:
        kinds.append(call())
        asks = always or (possible and _hash(kinds[0]) not in known)
        if asks or each_time:
            served = check()
            kinds += [] if served is None else [f"{kinds[0]}, computed by {served}"]
            asks = asks or (possible and _hash(kinds[-1]) not in known)
        said = kinds[-1]
        if asks:
            given = [f"bits of {name}: {bits}" for name, bits in values().items()]
            said = ", ".join([said, *given, *(["compared in every call"] if always else [])])
    except Exception as raised:
        name = "" if isinstance(raised, ContractError) else f"{type(raised).__name__}: "
        error, said = raised, f"refused: {name}{raised}"
    if asks and group.size > 1:
        _exchange(group, said, device, error)
    if error is not None:
        raise error
    if asks:
        known.update(map(_hash, kinds))


def reads_values(validate: bool | None, device: torch.device) -> bool:
    """Whether a call checks the contents of tensors."""
    return validate is True or (validate is None and (device.type == "cpu" or validates(None)))


def shown(value: Any) -> str:
    """An argument in the description of a call. What is long is cut, with a hash of all of it."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, Tensor):
        return describe(value)
    text = repr(value.tolist() if hasattr(value, "tolist") else value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters, hash {_hash(text).hex()})"


def bits(tensors: Mapping[str, Any], live: Tensor | None = None) -> dict[str, str]:
    """Checksums of those arguments that are tensors, of live rows."""
    return {name: checksum(t, live) for name, t in tensors.items() if isinstance(t, Tensor)}


def _exchange(group: Group, text: str, device: torch.device, error: Exception | None) -> None:
    try:
        said = _said_by_others(group, text, device)
    except RanksError as of_ranks:
        raise of_ranks if error is None else error from of_ranks
    if error is None and said:
        calls = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(said) if each not in said[:rank])
        raise ContractError(f"the ranks of the group do not make the same call: {calls}")


def _said_by_others(group: Group, text: str, device: torch.device) -> list[str]:
    """What each rank says, if they do not say the same."""
    own = torch.frombuffer(bytearray(_hash(text)), dtype=torch.uint8).to(device)
    hashes = group.all_gather(own).cpu()
    if bool((hashes == hashes[0]).all()):
        return []
    data = bytearray(text.encode()[:_SHOWN].ljust(_SHOWN))
    texts = group.all_gather(torch.frombuffer(data, dtype=torch.uint8).to(device)).cpu()
    return [_read(row) for row in texts]


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _read(row: Tensor) -> str:
    return bytes(row.tolist()).decode(errors="ignore").rstrip()
