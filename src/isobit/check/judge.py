"""The verdict of a cell: of what a law compared, raised or left behind."""

from collections.abc import Callable

from isobit.check.candidate import BadOutputs
from isobit.check.cell import FAIL, UNSUPPORTED, Cell
from isobit.check.torch_state import in_words
from isobit.frame.backend import UnsupportedError
from isobit.spec.compare import OutputCheck
from isobit.spec.trial import LawBroken, NeverEnds, Unsupported


def judge(
    cell: Cell, law: Callable[[], list[OutputCheck]], where: Callable[[BaseException], str]
) -> BaseException | None:
    """Run a cell's law and store its verdict. Returns an unexpected exception, None otherwise; `where` says
    which line raised it."""
    try:
        checks = law()
        bad = [c for c in checks if not c.passed]
        cell.outputs = [c.to_json() for c in checks]
        if not checks:
            cell.status, cell.reason = FAIL, "the law compared nothing"
        elif bad:
            cell.status, cell.reason = FAIL, f"{bad[0].output}: {bad[0].message}"
    except (Unsupported, UnsupportedError) as why:
        cell.status, cell.reason = UNSUPPORTED, str(why)
    except (LawBroken, BadOutputs) as broken:
        cell.status, cell.reason = FAIL, str(broken)
        return broken if isinstance(broken, NeverEnds) else None
    except (Exception, SystemExit) as error:
        # A backend may raise anything; the suite continues, and the row says what and where.
        cell.status, cell.reason = FAIL, f"{type(error).__name__}: {error} ({where(error)})"
        return error
    return None


def blame_for(cell: Cell, changed: list[str]) -> None:
    """A candidate that changes PyTorch's state changes what its caller computes afterwards, and here what it
    was compared with: whatever else is wrong, this comes first."""
    if changed:
        reasons = [in_words(changed), *([cell.reason] if cell.reason else [])]
        cell.status, cell.reason = FAIL, "; then: ".join(reasons)
