"""What the command line requests, the same for every subject."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from isobit.bench.cases import Subject, parse_case
from isobit.bench.runner import Job, planned
from isobit.spec.proof import Case


@dataclass(frozen=True)
class Wanted:
    """Empty means everything."""

    sizes: tuple[str, ...]  # N=4096,V=50257,dtype=bf16
    directions: tuple[str, ...]
    backend: str | None
    impls: tuple[str, ...]
    options: Mapping[str, Any]
    core: bool

    def cases(self, subject: Subject) -> list[Case] | None:
        return [parse_case(text, subject) for text in self.sizes] or None

    def planned(self, subject: Subject, device: torch.device) -> list[Job]:
        """What would be timed for a subject; an error for requested things that would not be."""
        return planned(
            subject, self.cases(subject), self.directions or None, device, self.backend, self.impls or None,
            self.options, self.core,
        )  # fmt: skip
