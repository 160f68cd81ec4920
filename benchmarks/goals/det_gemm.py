"""Speed goals of `det_gemm` and the layers made of it."""

from collections.abc import Callable

from isobit.bench.goals import Cell, Goal, prediction
from isobit.layers.propose import proposed_class
from isobit.numerics import CHAIN16, TREE8, Numerics


def _is(*names: str) -> Callable[[Cell], bool]:
    return lambda cell: cell.op in names


def _few(cell: Cell) -> bool:
    return cell.op in ("det_gemm", "det_gemm_layers") and cell.sizes["M"] <= 768


def _many(cell: Cell) -> bool:
    return cell.op in ("det_gemm", "det_gemm_layers", "det_gemm_dx") and cell.sizes["M"] > 768


def _rows(least: int, most: int) -> Callable[[Cell], bool]:
    return lambda cell: cell.op == "det_gemm_cold" and least <= cell.sizes["M"] <= most


def _in_tree(
    least_m: int, most_m: int, *, N: int = 10**6, least_k: int = 0, most_k: int = 10**6
) -> Callable[[Cell], bool]:
    """Layers with up to N outputs and a k in these bounds."""

    def chooses(cell: Cell) -> bool:
        size = cell.sizes
        return _rows(least_m, most_m)(cell) and size["N"] <= N and least_k <= size["K"] <= most_k

    return chooses


def _proposed(numerics: Numerics) -> Callable[[Cell], bool]:
    """Layers for which this class is proposed, decoding."""

    def chooses(cell: Cell) -> bool:
        return _rows(1, 512)(cell) and proposed_class(cell.sizes["K"], cell.sizes["N"]) == numerics

    return chooses


CHAIN, TREE = "isobit", "isobit:tree8"


def _in_its_class(sizes: dict[str, int]) -> str:
    """A layer in the class that is proposed for it, at any number of rows."""
    return TREE if proposed_class(sizes["K"], sizes["N"]) == TREE8 else CHAIN


def _slow_in_a_chain(cell: Cell) -> bool:
    return _in_tree(1, 512, N=5120)(cell) and cell.others.get(CHAIN, 1.0) < 0.9


GOALS = (
    Goal("forward and dX, M > 768", _many, mean=0.98, least=0.90),
    Goal("dW, M >= 1024", _is("det_gemm_dw"), mean=0.95),
    Goal("forward, M <= 768, where torch.mm has the same bits",
         lambda cell: _few(cell) and not cell.other_bits, mean=0.95, least=0.80),
    Goal("forward, M <= 768, where torch.mm has other bits: it splits k",
         lambda cell: _few(cell) and cell.other_bits, mean=0.80, least=0.60),
    Goal("rollouts, M <= 32", _rows(1, 32), mean=0.97),
    Goal("rollouts, M 33 to 128", _rows(33, 128), mean=0.92, least=0.75),
    Goal("rollouts, M 129 to 1300", _rows(129, 1300), mean=0.92, least=0.75),
    Goal("rollouts, M > 1300", _rows(1301, 10**6), mean=0.99),
    Goal("rollouts, dX", _is("det_gemm_cold_dx"), mean=0.95),
    Goal("rollouts, dW", _is("det_gemm_cold_dw"), mean=0.95),
    Goal("rollouts in class tree8, M <= 512, N <= 5120", _in_tree(1, 512, N=5120), mean=1.0, impl=TREE),
    Goal("rollouts in class tree8, where chain16 is under 0.9, M <= 512, N <= 5120", _slow_in_a_chain,
         least=1.1, impl=TREE),
    Goal("rollouts in class tree8, M > 1300, K >= 4096", _in_tree(1301, 10**6, least_k=4096), mean=0.90,
         impl=TREE),
    Goal("rollouts in class tree8, M > 1300, K 1536 to 4095",
         _in_tree(1301, 10**6, least_k=1536, most_k=4095), mean=0.80, impl=TREE),
    Goal("rollouts, M <= 512, each layer in the class that is proposed for it", _rows(1, 512), mean=0.97,
         least=0.88, impl=_in_its_class),
    Goal("rollouts, M <= 512, layers for which chain16 is proposed", _proposed(CHAIN16), mean=0.97,
         least=0.88),
    Goal("rollouts, M <= 512, layers for which tree8 is proposed", _proposed(TREE8), mean=0.97, least=0.88,
         impl=TREE),
    Goal("time, by what the rule for tiles expects", lambda cell: cell.op != "det_linear", most=1.25,
         against=prediction()),
)  # fmt: skip
