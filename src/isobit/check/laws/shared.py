"""Law W for gradients of arguments that all rows share, such as a weight: these are sums over rows.

They depend only on the stream of live rows: not on other rows, wherever they are, and not on the
schedule. Gradients of rows do not depend on which other gradients are computed.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from isobit.check.rows import rows_of
from isobit.kernels.host.token_stream import GROUP
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args
from isobit.spec.trial import Trial


def shared_gradients(trial: Trial) -> list[OutputCheck]:
    """Returns no checks for an op that declares nothing shared."""
    shared, proof, rows = trial.proof.shared, trial.proof, rows_of(trial.op)
    if shared is None:
        return []
    args = rows.flat(trial.args())
    N, (outputs, whole) = rows.count(args), trial.backward(args)
    cotangents = trial.cotangents(outputs)
    names = [name for name in whole if name not in rows.args]
    everyone = torch.arange(N, device=trial.device)

    def gradients(changed: Args, given: Sequence[Tensor]) -> list[Tensor]:
        result = replace(trial, given=tuple(given)).backward(changed)[1]
        return [result[name] for name in names]

    def same(what: str, changed: Args, given: Sequence[Tensor]) -> list[OutputCheck]:
        result = gradients(changed, given)
        return [same_bits(f"gradient:{n}", g, whole[n], what) for n, g in zip(names, result, strict=True)]

    checks = []
    for where, at, total in _places(N, trial.device):
        given = rows.spread(cotangents, at, total)
        ignored = args | _among(proof.padding(args, total), args, at, rows.present(args))
        checks += same(f"ignored rows full of NaN {where}", ignored, given)
        # The same rows excluded by a mask only.
        ours = torch.zeros(total, dtype=torch.bool, device=trial.device).index_fill(0, at, True)
        masked = args | _among(shared.maskable(args, total), args, at, rows.present(args))
        masked[shared.mask] = ours if args[shared.mask] is None else ignored[shared.mask]
        checks += same(f"masked rows full of NaN {where}", masked, given)
    if args[shared.mask] is not None:
        index = everyone[shared.live(args)]
        packed = rows.select(args, index) | {shared.mask: None}
        checks += same("packed: masked rows taken out", packed, rows.of_outputs(cotangents, index))
    schedules = {what: args | changes for what, changes in shared.schedules(args).items()}
    for what, changed_args in schedules.items():
        if trial.refusal(changed_args) is not None:  # a candidate may not take schedule arguments
            continue
        checks += same(what, changed_args, cotangents)
    for name in (name for name in whole if name in rows.args):
        alone = replace(trial, only=(name,)).backward(args)[1]
        checks.append(same_bits(f"gradient:{name}", alone[name], whole[name], "asked for alone"))
    reversed_groups = torch.cat(everyone.split(GROUP)[::-1])
    changed = gradients(rows.select(args, reversed_groups), rows.of_outputs(cotangents, reversed_groups))
    what = f"groups of {GROUP} rows in another order"
    return [*checks, trial.control(what, [whole[n] for n in names], changed)]


def _places(N: int, device: torch.device) -> list[tuple[str, Tensor, int]]:
    """Positions of the rows of a batch among other rows, in their order."""
    gen = torch.Generator().manual_seed(11)
    more = N // 3 + 9
    anywhere = torch.randperm(N + more, generator=gen)[:N].sort().values
    return [("in front", torch.arange(9, N + 9, device=device), N + 9),
            ("anywhere", anywhere.to(device), N + more)]  # fmt: skip


def _among(others: Args, args: Args, at: Tensor, names: list[str]) -> Args:
    """The rows of a batch at these places among others."""
    return {n: others[n].index_copy(0, at, args[n]) for n in names}
