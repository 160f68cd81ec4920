"""Grids of a report: rows by one size, columns by the others, one grid for each choice of options."""

import math
from collections.abc import Callable, Sequence

from isobit.bench.goals import Cell, cells
from isobit.bench.report import Row


def by_options(some: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells by their options, which a grid cannot show."""
    groups: dict[str, list[Cell]] = {}
    for cell in some:
        options = (word for word in cell.case.split() if "=" in word and word.split("=")[0] not in cell.sizes)
        groups.setdefault(" ".join(options), []).append(cell)
    return groups


def fills_a_grid(some: Sequence[Cell]) -> bool:
    """Whether at least half of the grid is filled."""
    row_size, *column_sizes = some[0].sizes
    columns = {tuple(cell.sizes[name] for name in column_sizes) for cell in some}
    return 2 * len(some) >= len({cell.sizes[row_size] for cell in some}) * len(columns)


def _different(some: Sequence[Cell]) -> list[str]:
    """The first size, and those of the others that vary between cells; or all, if none varies."""
    row_size, *column_sizes = some[0].sizes
    varying = [name for name in column_sizes if len({cell.sizes[name] for cell in some}) > 1]
    return [row_size, *(varying or column_sizes)]


def same_in_all(some: Sequence[Cell]) -> list[str]:
    named = _different(some)
    same = " ".join(f"{name}={size}" for name, size in some[0].sizes.items() if name not in named)
    return [same] if same else []


#: A grid with more columns would be wider than a page, and is divided into several.
MOST_COLUMNS = 9


def share(cell: Cell) -> str:
    """The share of the baseline's speed; with an asterisk if bits differ."""
    return f"{cell.share:.2f}" + "\\*" * cell.other_bits


def with_copy(rows: Sequence[Row]) -> Callable[[Cell], str] | None:
    """The same, and the share of the speed of a copy of as many bytes; None if no copy was timed."""
    copies = {(cell.case, cell.direction): cell.share for cell in cells(rows, "copy")}

    def both(cell: Cell) -> str:
        return f"{share(cell)}, {copies[cell.case, cell.direction]:.2f}"

    return both if copies else None


def rate_of(rows: Sequence[Row]) -> Callable[[Cell], str]:
    """isobit's TB/s."""
    rates = {(row["case"], row["direction"]): row["tbps"] for row in rows if row["impl"] == "isobit"}
    return lambda cell: f"{rates[cell.case, cell.direction]:.2f}"


def grids(some: Sequence[Cell], shown: Callable[[Cell], str] | None = None) -> list[list[list[str]]]:
    """Tables of cells, by default of their shares: rows by the first size, columns by the rest, each in
    ascending order."""
    row_size, *column_sizes = _different(some)
    columns = list(dict.fromkeys(tuple(cell.sizes[name] for name in column_sizes) for cell in some))
    known = {(cell.sizes[row_size], tuple(cell.sizes[name] for name in column_sizes)): cell for cell in some}
    each = math.ceil(len(columns) / math.ceil(len(columns) / MOST_COLUMNS))
    tables = []
    for own in (columns[i : i + each] for i in range(0, len(columns), each)):
        titles = (
            " ".join(f"{n}={size}" for n, size in zip(column_sizes, sizes, strict=True)) for sizes in own
        )
        lines = [[row_size, *titles]]
        for size in sorted({cell.sizes[row_size] for cell in some}):
            line = [known.get((size, column)) for column in own]
            lines.append([str(size), *("-" if cell is None else (shown or share)(cell) for cell in line)])
        tables.append(lines)
    return tables
