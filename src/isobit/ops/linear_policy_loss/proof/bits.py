"""Bit laws: equal to `linear_logp`, and independent of chunks, packing and other rows.

law F   logp, entropy and a row's dhidden depend on the row alone
law W   dweight and dbias depend on the live rows and on their order: not on where chunks end
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.token_stream import GROUP
from isobit.ops.linear_logp.op import linear_logp
from isobit.ops.linear_logp.proof.inputs import rolled_vocabulary
from isobit.ops.linear_policy_loss import chunk_buffers
from isobit.ops.linear_policy_loss.chunked import PLAIN
from isobit.ops.linear_policy_loss.op import batch_of, linear_policy_loss
from isobit.ops.linear_policy_loss.proof import inputs
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args
from isobit.spec.trial import Trial, Unsupported

Gradients = dict[str, Tensor]


def gradients(trial: Trial, args: Args) -> Gradients:
    """Gradients of a loss whose own gradient is 1; those of hidden states as [N, D]."""
    one = torch.ones((), device=trial.device)
    result = replace(trial, given=(one,)).backward(args)[1]
    return {name: g.flatten(0, -2) if name == "hidden" else g for name, g in result.items()}


def same_gradients(what: str, ours: Gradients, theirs: Gradients, *names: str) -> list[OutputCheck]:
    chosen = [name for name in theirs if not names or name in names]
    return [same_bits(f"gradient:{name}", ours[name], theirs[name], what) for name in chosen]


# Against linear_logp


def equal_to_linear_logp(trial: Trial) -> list[OutputCheck]:
    """Log-probabilities, entropies, and all gradients, if all rows are kept or none is."""
    args = trial.args()
    ours, seen = gradients(trial, args), results(trial, args)
    call: dict[str, Any] = inputs.as_linear_logp(args) | {"return_entropy": True, "backend": trial.backend}
    names, leaves = trial.leaves(args), {}
    for name in names:
        leaves[name] = call[name].detach().requires_grad_()
    kept = {chunk.fits for chunk in chunks_of(trial, args)}
    if kept != {True}:
        call["workspace_bytes"] = None
    logp, entropy = linear_logp(**call | leaves)
    checks = [same_bits("logp", seen[0], logp.detach(), "chunks against linear_logp")]
    if args["entropy"]:
        checks.append(same_bits("entropy", seen[1], entropy.detach(), "chunks against linear_logp"))
    if leaves and len(kept) == 1:
        loss, _ = args["loss_fn"](logp, entropy if args["entropy"] else None, **args["inputs"])
        gradients_of_both = torch.autograd.grad(loss, list(leaves.values()))
        theirs = dict(zip(names, gradients_of_both, strict=True))
        theirs |= {"hidden": theirs["hidden"].flatten(0, -2)} if "hidden" in theirs else {}
        checks += same_gradients("linear_logp and the loss", ours, theirs)
    return checks


def results(trial: Trial, args: Args) -> list[Tensor]:
    """(logp, entropy), as loss_fn receives them chunk by chunk."""
    seen: list[tuple[Tensor, ...]] = []

    def watched(logp: Tensor, entropy: Tensor | None, **given: Any) -> Any:
        seen.append(tuple(t.detach() for t in (logp, entropy) if t is not None))
        return inputs.weighed(logp, entropy, **given)

    mine = args | {name: args[name].detach().requires_grad_() for name in trial.leaves(args)}
    linear_policy_loss(**mine | {"loss_fn": watched}, validate=False, backend=trial.backend)
    return [torch.cat(parts) for parts in zip(*seen, strict=True)]


def chunks_of(trial: Trial, args: Args) -> list[Any]:
    (V, D), dtype = args["weight"].shape, args["hidden"].dtype
    room = chunk_buffers.CHUNK_BYTES if args["workspace_bytes"] is None else args["workspace_bytes"]
    return batch_of(args).chunks(chunk_buffers.capacity(trial.backend, V, D, dtype, room))


# Independent of chunks and other rows


def invariant(trial: Trial) -> list[OutputCheck]:
    if not trial.gradient:
        raise Unsupported("it compares gradients, which are switched off on the command line")
    args = trial.args()
    as_given, flat = gradients(trial, args), flattened(args)
    checks, whole = list[OutputCheck](), as_given
    for what, changes in schedules(trial, args):
        checks += same_gradients(what, gradients(trial, args | changes), whole)
    if all(chunk.fits for chunk in chunks_of(trial, args)) or trial.backend != "hopper":
        checks += same_gradients("the same rows, flat", gradients(trial, flat), whole)
    else:  # a sequence that does not fit is not kept, but its rows alone would be
        whole = gradients(trial, flat)
    N = flat["token_ids"].numel()
    gen = torch.Generator().manual_seed(7)
    for size in sorted(n for n in {1, 7, 129, N // 2, N - 1} if 0 < n < N):
        index = torch.randperm(N, generator=gen)[:size].to(trial.device)
        checks += of_rows(f"{size} of {N} rows alone", trial, selected(flat, index), whole, index)
    index = torch.randperm(N, generator=gen).to(trial.device)
    checks += of_rows("rows permuted", trial, selected(flat, index), whole, index)
    for where, at, total in places(N, trial.device):
        changed = gradients(trial, among(flat, at, total))
        here = changed | {"hidden": changed["hidden"][at]}
        checks += same_gradients(f"masked rows, full of NaN, {where}", here, whole)
    for layout in trial.proof.layouts:
        laid = inputs.lay_out(args, layout)
        laid_out = gradients(trial.in_class(laid), laid)
        checks += same_gradients(f"layout {layout}", laid_out, as_given)
    reversed_groups = torch.cat(torch.arange(N, device=trial.device).split(GROUP)[::-1])
    sums = [name for name in whole if name != "hidden"]
    moved = gradients(trial, selected(flat, reversed_groups))
    what = f"groups of {GROUP} rows in another order"
    checks.append(trial.control(what, [whole[n] for n in sums], [moved[n] for n in sums]))
    rolled = gradients(trial, {name: rolled_vocabulary(flat | PLAIN)[name] for name in flat})
    return [*checks, trial.control("the vocabulary rolled", [whole["hidden"]], [rolled["hidden"]])]


def schedules(trial: Trial, args: Args) -> Iterator[tuple[str, Args]]:
    """Other chunk boundaries, and other slabs of d-logits, that keep the same rows."""
    V, D = args["weight"].shape
    least = chunk_buffers.MIN_ROWS
    sizes = [chunk_buffers.bytes_for(n, V, D) for n in (least, least + 128, 2 * least + 384)] + [0]
    kept = [(chunk.first, chunk.end) for chunk in chunks_of(trial, args) if chunk.fits]
    for size in sizes:
        changes = {"workspace_bytes": size}
        now = [(chunk.first, chunk.end) for chunk in chunks_of(trial, args | changes) if chunk.fits]
        if rows_in(now) == rows_in(kept):
            yield f"workspace_bytes={size}", changes


def rows_in(stretches: list[tuple[int, int]]) -> set[int]:
    return {row for first, end in stretches for row in range(first, end)}


def of_rows(what: str, trial: Trial, changed: Args, whole: Gradients, index: Tensor) -> list[OutputCheck]:
    """Checks rows of dhidden when they are next to other rows."""
    result = gradients(replace(trial, only=("hidden",)), changed)
    return same_gradients(what, result, {"hidden": whole["hidden"][index]})


# Moving rows

_BY_ROWS = ("hidden", "token_ids", "mask", "temperature")


def flattened(args: Args) -> Args:
    """The same rows [N], with the gain of each sequence folded into the weights of its rows."""
    given, lead = dict(args["inputs"]), args["token_ids"].ndim
    gains, lengths = given.pop("gains", None), given.pop("lengths", None)
    if gains is not None:
        gains = gains[:, None] if lengths is None else gains.repeat_interleave(lengths)
        given["weights"] = given["weights"] * gains
    result = {n: args[n].flatten(0, lead - 1) for n in _BY_ROWS if isinstance(args[n], Tensor)}
    return args | result | {"inputs": given | {"weights": given["weights"].flatten()}, "cu_seqlens": None}


def selected(args: Args, index: Tensor) -> Args:
    """These rows, in this order."""
    result = {n: args[n][index] for n in _BY_ROWS if isinstance(args[n], Tensor)}
    return args | result | {"inputs": args["inputs"] | {"weights": args["inputs"]["weights"][index]}}


def among(args: Args, at: Tensor, total: int) -> Args:
    """The rows at these places among padding rows, in their order."""
    others = inputs.padding(args, total)
    result = {n: others[n].index_copy(0, at, args[n]) for n in _BY_ROWS if isinstance(args[n], Tensor)}
    weights = others["weights"].index_copy(0, at, args["inputs"]["weights"])
    return args | result | {"inputs": args["inputs"] | {"weights": weights}}


def places(N: int, device: torch.device) -> list[tuple[str, Tensor, int]]:
    gen = torch.Generator().manual_seed(11)
    more = N // 3 + 9
    anywhere = torch.randperm(N + more, generator=gen)[:N].sort().values
    return [("in front", torch.arange(9, N + 9, device=device), N + 9),
            ("anywhere", anywhere.to(device), N + more)]  # fmt: skip
