"""All ranks of a group make the same call, or every one of them raises an error that says how they differ.

A rank that passes another option would wait for others that never come, or give them numbers of another
class. So before a call exchanges anything, ranks exchange a hash of what they are about to do: 8 bytes each.
"""

import hashlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from isobit.frame.call_plan import validates
from isobit.frame.contract import ContractError, describe, dtype_name
from isobit.ranks.group import Group

#: Bytes of a description that others are shown.
_SHOWN = 512

#: What ranks have agreed about, by group.
_agreed: "WeakKeyDictionary[Any, set[bytes]]" = WeakKeyDictionary()


def agree(
    group: Group, call: str, check: Callable[[], None], device: torch.device, validate: bool | None = None
) -> None:
    """Every rank raises a ContractError if `check` raises one on any of them, or if `call`, the description
    of what a rank is about to compute, is not the same on all. `check` exchanges nothing.

    With validate=None that is done in every call on CPU tensors and with ISOBIT_VALIDATE=1, elsewhere at the
    first call of its kind: reading the answer is a host sync. validate=True does it in every call, and
    validate=False in none. In a CUDA graph that is being captured nothing is exchanged.

    What ranks have agreed about is the same set on all of them, since they add to it together. If later one
    of them makes another call than the others, nothing notices it. If its call is new, it waits with its hash
    for ranks that exchange tensors. If both calls are known, tensors of two calls meet: that is a hang, or
    wrong numbers where their sizes in bytes are equal.
    """
    if not _asks(group, call, device, validate):
        return
    error = None
    try:
        check()
    except ContractError as raised:
        error, call = raised, f"refused: {raised}"
    if group.size > 1:
        _exchange(group, call, device, error)
    if error is not None:
        raise error
    _agreed_of(group).add(_hash(call))


def _asks(group: Group, call: str, device: torch.device, validate: bool | None) -> bool:
    if validate is False or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return False
    return reads_values(validate, device) or _hash(call) not in _agreed_of(group)


def reads_values(validate: bool | None, device: torch.device) -> bool:
    """Whether a call checks the contents of tensors."""
    return validate is True or (validate is None and (device.type == "cpu" or validates(None)))


def shown(value: Any) -> str:
    """An argument in the description of a call."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return describe(value) if isinstance(value, Tensor) else str(value)


def _agreed_of(group: Group) -> set[bytes]:
    return _agreed.setdefault(getattr(group, "group", group), set())


def _exchange(group: Group, text: str, device: torch.device, error: ContractError | None) -> None:
    own = torch.frombuffer(bytearray(_hash(text)), dtype=torch.uint8).to(device)
    hashes = group.all_gather(own).cpu()
    if bool((hashes == hashes[0]).all()):
        return
    data = bytearray(text.encode()[:_SHOWN].ljust(_SHOWN))
    texts = group.all_gather(torch.frombuffer(data, dtype=torch.uint8).to(device)).cpu()
    if error is not None:
        raise error
    said = [_read(row) for row in texts]
    calls = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(said) if each not in said[:rank])
    raise ContractError(f"the ranks of the group do not make the same call: {calls}")


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _read(row: Tensor) -> str:
    return bytes(row.tolist()).decode(errors="ignore").rstrip()
