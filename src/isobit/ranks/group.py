"""A group of ranks: processes of torch.distributed, or ranks of one process that run in turn (`in_turn`).

A group moves bytes and adds nothing. Sums over ranks are made of its two collectives, `all_gather` and
`all_to_all`, so no order is left to a library, and the bits do not depend on who moves the bytes.
"""

import weakref
from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import torch
from torch import Tensor

from isobit.frame.contract import ContractError

#: How many ranks may share a sum: what divides the eight leaves of the trees.
SIZES = (1, 2, 4, 8)


class RanksError(RuntimeError):
    """Ranks could not exchange a tensor: one of them has ended, or took longer than the time-out."""


#: Errors in a collective that are about this rank alone: memory, and kernels that ran before.
_OF_THIS_RANK = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


class Group(ABC):
    """One rank's view of its group."""

    rank: int
    size: int

    @abstractmethod
    def all_gather(self, t: Tensor) -> Tensor:
        """[size, *t.shape]: the tensor of every rank, in the order of ranks. Shape and dtype are the same on
        all ranks."""

    @abstractmethod
    def all_to_all(self, t: Tensor) -> Tensor:
        """t is [size, ...]. t[i] goes to rank i; what comes from rank i is result[i]."""

    @abstractmethod
    def __hash__(self) -> int: ...

    @abstractmethod
    def __eq__(self, other: object) -> bool: ...


class Processes(Group):
    """A process group of torch.distributed: NCCL, gloo, or any other with these two collectives. It does not
    keep the process group alive."""

    def __init__(self, group: Any) -> None:
        self._group, self._hash = weakref.ref(group), hash(group)
        self.rank, self.size = group.rank(), group.size()

    @property
    def group(self) -> Any:
        group = self._group()
        if group is None:
            raise RanksError(f"rank {self.rank} of {self.size}: its process group no longer exists")
        return group

    def all_gather(self, t: Tensor) -> Tensor:
        if self.size == 1:
            return t[None]
        given = t.contiguous()
        out = given.new_empty((self.size * given.numel(),))
        self._run(_all_gather(), t, out, given.view(-1))
        return out.view(self.size, *t.shape)

    def all_to_all(self, t: Tensor) -> Tensor:
        if self.size == 1:
            return t
        given = t.contiguous()
        out = torch.empty_like(given)
        self._run("all_to_all_single", t, out, given)
        return out

    def _run(self, collective: str, given: Tensor, *tensors: Tensor) -> None:
        import torch.distributed as dist

        try:
            getattr(dist, collective)(*tensors, group=self.group)
        except _OF_THIS_RANK:
            raise
        except RuntimeError as error:
            raise RanksError(
                f"rank {self.rank} of {self.size}: {collective} of {list(given.shape)} {given.dtype} failed. "
                f"Another rank has ended, makes another call, or took longer than the group's time-out"
                f"{self._timeout(given.device)}, which init_process_group and new_group take as `timeout`: "
                f"{error}"
            ) from error

    def _timeout(self, device: torch.device) -> str:
        """The time-out in words, if the backend of such tensors says it."""
        options = getattr(_backend_of(self.group, device), "options", None)
        timeout = getattr(options, "_timeout", None)
        return "" if timeout is None else f" of {timeout.total_seconds():g} s"

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Processes) and other.group is self.group)

    def __repr__(self) -> str:
        return f"Processes(rank {self.rank} of {self.size})"


class Alone(Group):
    """A single rank, without any others."""

    rank, size = 0, 1

    def all_gather(self, t: Tensor) -> Tensor:
        return t[None]

    def all_to_all(self, t: Tensor) -> Tensor:
        return t

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alone)


#: The group of a call without one.
ALONE = Alone()


#: By process group, as long as that exists: layers are called with it in every forward.
_known: "weakref.WeakKeyDictionary[Any, Processes]" = weakref.WeakKeyDictionary()


@cache
def _kinds() -> tuple[Any, Any]:
    """The classes of what a user gives. They are imported when somebody gives one."""
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    return ProcessGroup, DeviceMesh


@cache
def _all_gather() -> str:
    """Torch 2.13 has another name for it, and warns of the old one."""
    import torch.distributed as dist

    return "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def _backend_of(group: Any, device: torch.device) -> Any:
    try:
        return group._get_backend(device)
    except RuntimeError:  # a group that moves no such tensors
        return None


def as_group(what: str, group: Any) -> Group:
    """The group that a user gives: a ProcessGroup, a one-dimensional DeviceMesh, a `Group`, or None for a
    single rank. `what` begins the message if it is none of them, or has a number of ranks that the trees
    cannot be cut into."""
    if group is None:
        return ALONE
    if not isinstance(group, Group):
        ProcessGroup, DeviceMesh = _kinds()
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ContractError(
                    f"{what}(group: a mesh of {group.ndim} dimensions {group.mesh_dim_names}): must have one "
                    'dimension; select it by name: mesh["tp"]'
                )
            group = group.get_group()
        if not isinstance(group, ProcessGroup):
            raise ContractError(
                f"{what}(group: {type(group).__name__}): must be a ProcessGroup of torch.distributed that "
                "this rank belongs to, or a DeviceMesh of one dimension"
            )
        known = _known.get(group)
        if known is None:
            known = _known[group] = Processes(group)
        group = known
    if group.size not in SIZES:
        raise ContractError(
            f"{what}(group: {group.size} ranks): must have 1, 2, 4 or 8 ranks: sums are trees of eight leaves"
        )
    return group
