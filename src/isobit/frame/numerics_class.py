"""What a numerics class is, and every class by name. `isobit.numerics` has the classes themselves."""

from dataclasses import dataclass

from isobit.frame.contract import ContractError

#: Every class by name: those below, and those that ops declare.
NUMERICS: dict[str, "Numerics"] = {}


@dataclass(frozen=True, eq=False)
class Numerics:
    """One class. It is interchangeable with its name: `str()` returns the name, and a class equals its
    name."""

    name: str
    spec: str
    hardware: str

    def __post_init__(self) -> None:
        if self.name in NUMERICS:
            raise ValueError(f"numerics class {self.name!r} is declared twice")
        NUMERICS[self.name] = self

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return self.name == str(other) if isinstance(other, (str, Numerics)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)


def known_numerics(name: str | Numerics) -> Numerics:
    """The class of this name (or the class itself), or an error that lists the known ones."""
    numerics = NUMERICS.get(str(name))
    if numerics is None:
        raise ContractError(f"unknown numerics class {str(name)!r}; known: {', '.join(NUMERICS)}")
    return numerics
