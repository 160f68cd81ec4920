"""Losses that are declared to be sums over rows: `linear_policy_loss` may split their sequences."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_device import Device
from isobit import ContractError, losses
from isobit.ops.linear_policy_loss.op import linear_policy_loss
from policy_loss_calls import bytes_for, make, on_all_rows
from test_linear_policy_loss_hopper import (  # noqa: F401
    assert_same,
    chunked,
    device,
    flat_call,
    new_memory_is_nan,
    one_thread,
    tokens_loss,
    unfused,
    workspace_for,
)


@losses.by_rows
def by_rows(logp: Tensor, entropy: Tensor | None, weights: Tensor, gains: Tensor, sizes: list[Any]) -> Any:
    sizes.append(tuple(logp.shape))
    gains = gains[:, None] if logp.ndim == 2 else gains[:1]
    return (weights * gains * logp).sum(), {"rows": logp.numel()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_sum_over_rows_gets_parts_of_sequences_that_do_not_fit(packed: bool, gradients: bool) -> None:
    """Of those alone: short ones stay whole."""
    hidden, weight, ids = make(2, 9)
    gen = torch.Generator().manual_seed(3)
    given: dict[str, Any] = {"weights": torch.randn(2, 9, generator=gen)}
    gains, sizes = torch.randn(2, generator=gen), list[Any]()
    expected, theirs = on_all_rows(
        lambda logp, entropy, weights: (weights * gains[:, None] * logp).sum(), (hidden, weight, ids), given
    )
    given |= {"gains": gains, "sizes": sizes}
    rows: dict[str, Any] = {"workspace_bytes": bytes_for(4), "inputs": given, "validate": False}
    parts = [(1, 3)] * 6
    if packed:
        rows["cu_seqlens"], parts = [0, 9, 18], [(3,)] * 6
        given["weights"] = given["weights"].flatten()
        hidden, ids = hidden.flatten(0, 1), ids.flatten()
    with torch.set_grad_enabled(gradients):
        loss, stats = linear_policy_loss(hidden, weight, ids, loss_fn=partial(by_rows), **rows)
    assert sizes == parts and stats["rows"] == 18
    torch.testing.assert_close(loss, expected)
    if gradients:
        for ours, right in zip(torch.autograd.grad(loss, (hidden, weight)), theirs, strict=True):
            torch.testing.assert_close(ours.view(right.shape), right, rtol=1e-4, atol=1e-5)
    sizes.clear()
    linear_policy_loss(hidden, weight, ids, loss_fn=by_rows, **rows | {"workspace_bytes": bytes_for(10)})
    assert sizes == ([(9,)] * 2 if packed else [(1, 9)] * 2)


def test_a_mean_over_a_sequence_is_no_sum_over_rows() -> None:
    """What is declared is tested where values are validated."""
    hidden, weight, ids = make(2, 9)
    assert not hasattr(losses.grpo, "by_rows") and not hasattr(losses.gspo, "by_rows")
    options: dict[str, Any] = {"inputs": {"advantages": torch.ones(2), "normalizer": 2}}
    linear_policy_loss(hidden, weight, ids, loss_fn=losses.grpo, workspace_bytes=bytes_for(4), **options)
    wrong = losses.by_rows(partial(losses.grpo))
    linear_policy_loss(hidden, weight, ids, loss_fn=wrong, workspace_bytes=bytes_for(9), **options)
    with pytest.raises(ContractError, match="is not the sum of the shares of two parts"):
        linear_policy_loss(hidden, weight, ids, loss_fn=wrong, workspace_bytes=bytes_for(4), **options)


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "dual_clip_ppo", "cispo", "entropy_bonus"])
def test_losses_of_isobit_that_are_sums_over_rows(name: str) -> None:
    hidden, weight, ids = make(2, 9)
    given: dict[str, Any] = {"advantages": torch.tensor([1.0, -0.5]), "old_logp": torch.full((2, 9), -4.0)}
    if name == "entropy_bonus":
        given = {"coef": 0.1}
    given |= {"normalizer": 7, "mask": torch.rand(2, 9, generator=torch.Generator().manual_seed(5)) < 0.7}
    loss_fn, tensors = getattr(losses, name), (hidden, weight, ids)
    expected, theirs = on_all_rows(loss_fn, tensors, given, entropy=True)
    loss, _ = linear_policy_loss(
        *tensors, loss_fn=loss_fn, inputs=given, entropy=True, workspace_bytes=bytes_for(4)
    )
    torch.testing.assert_close(loss, expected)
    for ours, right in zip(torch.autograd.grad(loss, (hidden, weight)), theirs, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 650), None])
def test_on_hopper_their_bits_are_those_of_stored_probabilities(
    device: Device,  # noqa: F811
    shape: tuple[int, int] | None,
) -> None:
    """As if rows were flat: no logits are computed twice, and none of the parts shows."""
    args, inputs, wanted = flat_call(mask=0.7)
    flat, weights = dict(args), inputs
    options: dict[str, Any] = {
        "cu_seqlens": [0, 650, 650, 1300],
        "workspace_bytes": workspace_for(384, 300, 24),
    }
    if shape is not None:
        del options["cu_seqlens"]
        names = ("hidden", "token_ids", "mask")
        args |= {name: args[name].unflatten(0, shape) for name in names}
        inputs = {"weights": inputs["weights"].unflatten(0, shape)}
    _, _, result = chunked(args, losses.by_rows(partial(tokens_loss)), inputs, wanted, **options)
    assert device.launched.count("from_probs_kernel") == 4 and "slab_kernel" not in device.launched
    _, expected = unfused(flat, tokens_loss, weights, wanted)
    assert_same({name: g.flatten(0, -2) for name, g in result.items()}, expected)
