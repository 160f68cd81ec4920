"""Speed goals of `det_gemm` and the layers made of it."""

from collections.abc import Callable

from isobit.bench.goals import Cell, Goal, prediction


def _is(*names: str) -> Callable[[Cell], bool]:
    return lambda cell: cell.op in names


def _few(cell: Cell) -> bool:
    return cell.op in ("det_gemm", "det_gemm_layers") and cell.sizes["M"] <= 768


def _many(cell: Cell) -> bool:
    return cell.op in ("det_gemm", "det_gemm_layers", "det_gemm_dx") and cell.sizes["M"] > 768


def _rows(least: int, most: int) -> Callable[[Cell], bool]:
    return lambda cell: cell.op == "det_gemm_cold" and least <= cell.sizes["M"] <= most


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
    Goal("time, by what the rule for tiles expects", lambda cell: cell.op != "det_linear", most=1.25,
         against=prediction()),
)  # fmt: skip
