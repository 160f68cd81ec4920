"""Speed goals of `linear_logp`."""

from collections.abc import Callable, Sequence

from isobit.bench.goals import Cell, Goal, longer_of_floor_and, prediction
from isobit.ops.linear_logp.rivals import BASELINE, SHAPES

_Sizes = dict[str, int]


def _shape(ops: str, chooses: Callable[[_Sizes], bool] = lambda sizes: True) -> Callable[[Cell], bool]:
    return lambda cell: cell.op in ops.split() and chooses(cell.sizes)


def _among(shapes: Sequence[tuple[int, ...]]) -> Callable[[_Sizes], bool]:
    return lambda sizes: tuple(sizes[name] for name in "NDV") in shapes


_usual = _among(SHAPES)
_FORWARD, _TRAIN = "linear_logp linear_logp_bias", "linear_logp_train linear_logp_train_bias"

#: As fractions of the speed of one product: 1 / 1.02 and so on; `most` as multiples of its time.
GOALS = (
    Goal("logp, D >= 2048",
         _shape("linear_logp", lambda n: _usual(n) and n["D"] >= 2048 and n["V"] % 64 == 0),
         mean=0.980, least=0.926),
    Goal("logp, 512 x 896 x 151936", _shape("linear_logp", _among(SHAPES[-1:])), least=0.833),
    Goal("logp, V = 50257", _shape("linear_logp", lambda n: n["V"] == 50257), least=0.800),
    Goal("logp and all gradients", _shape("linear_logp_train", _usual), mean=0.227),
    Goal("logp and the gradient of hidden states", _shape("linear_logp_frozen", _usual), mean=0.303),
    Goal("logp and all gradients, probabilities kept", _shape("linear_logp_kept", _usual), mean=0.294),
    Goal("logp, N >= 512", _shape(_FORWARD, lambda n: n["N"] >= 512), mean=0.971),
    Goal("logp, N <= 128", _shape("linear_logp", lambda n: n["N"] <= 128), most=1.0,
         against=longer_of_floor_and(BASELINE, 1.15, 6)),
    Goal("logp, N from 129 to 511", _shape("linear_logp", lambda n: 128 < n["N"] < 512), most=1.0,
         against=longer_of_floor_and(BASELINE, 1.4)),
    Goal("logp, N <= 200", _shape("linear_logp", lambda n: n["N"] <= 200 and n["D"] == 4096), most=1.0,
         against="verl"),
    Goal("logp with a bias", _shape("linear_logp_bias"), most=1.05, against="isobit:no bias"),
    Goal("logp and all gradients, N >= 2048", _shape(_TRAIN, lambda n: n["N"] >= 2048), mean=0.2326),
    Goal("logp and all gradients, N >= 2048, D >= 2048",
         _shape(_TRAIN, lambda n: n["N"] >= 2048 <= n["D"]), most=4.6, against=BASELINE),
    Goal("logp and all gradients, N >= 2048, D = 1024",
         _shape(_TRAIN, lambda n: n["N"] >= 2048 and n["D"] == 1024), most=5.0, against=BASELINE),
    Goal("logp and all gradients, N from 512 to 2047",
         _shape(_TRAIN, lambda n: 512 <= n["N"] < 2048), most=4.8, against=BASELINE),
    Goal("logp and all gradients, N < 512",
         _shape(_TRAIN, lambda n: n["N"] < 512), most=5.3, against=BASELINE),
    Goal("logp and the gradient of hidden states, D >= 2048",
         _shape("linear_logp_frozen", lambda n: n["D"] >= 2048), mean=0.303),
    Goal("logp and all gradients, probabilities kept, D >= 2048",
         _shape("linear_logp_kept", lambda n: n["D"] >= 2048), mean=0.2985),
    Goal("logp in class lse/8x4, next to lse/1", _shape("linear_logp", _usual), most=1.06, against="isobit",
         impl="isobit:hopper-8x4"),
    Goal("time, by what the model expects of the tile", _shape(_FORWARD), most=1.25, against=prediction()),
)  # fmt: skip
