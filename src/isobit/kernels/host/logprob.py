"""Log-probabilities of rows of logits in plain PyTorch, for the references of several ops.

`formula` defines a log-probability, for any floating dtype, differentiable. `row_results` and `dlogits` are
the same numbers for a backend, with an explicit gradient. `Rows` holds the tokens of rows, which of them are
live, and their temperatures.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from isobit.kernels.host.tokens import live_rows

INF = float("inf")


def formula(z: Tensor, token_ids: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse) of softmax(z), z [*, V] finite in masked rows. Those give 0; a live row with an
    invalid id gives NaN."""
    good = (token_ids >= 0) & (token_ids < z.shape[-1])
    log_p = z.log_softmax(-1)
    token = torch.where(good, token_ids, 0).long()
    logp = log_p.gather(-1, token[..., None])[..., 0]
    p = log_p.exp()
    entropy = -(p * torch.where(p == 0, 0.0, log_p)).sum(-1)  # a banned token: 0 * -inf must be 0 here
    nan = torch.zeros_like(logp).masked_fill(~good, float("nan"))
    logp, entropy, lse = (torch.where(live, x + nan, 0.0) for x in (logp, entropy, z.logsumexp(-1)))
    return logp, entropy, lse


class Rows(NamedTuple):
    """Everything that has one number per row."""

    ids: Tensor
    live: Tensor  # the row is not masked
    good: Tensor  # it is live and its id is valid
    temperature: Tensor | float

    @classmethod
    def of(
        cls, token_ids: Tensor, mask: Tensor | None, ignore_index: int, temperature: Tensor | float, V: int,
        dtype: torch.dtype,
    ) -> "Rows":  # fmt: skip
        """From a call with any leading shape. The temperature of a masked row may be anything."""
        ids = token_ids.reshape(-1)
        live = live_rows(token_ids, mask, ignore_index).reshape(-1)
        good = live & (ids >= 0) & (ids < V)
        if isinstance(temperature, Tensor):
            temperature = torch.where(good, temperature.reshape(-1).to(dtype), 1.0)
        return cls(ids, live, good, temperature)

    def chunk(self, rows: slice) -> "Rows":
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[rows]
        return Rows(self.ids[rows], self.live[rows], self.good[rows], temperature)

    @property
    def divisor(self) -> Tensor | float:
        """The temperature, for [rows, V]."""
        return self.temperature[:, None] if isinstance(self.temperature, Tensor) else self.temperature

    def tokens(self) -> Tensor:
        return torch.where(self.good, self.ids, 0).long()[:, None]

    def fill(self, dtype: torch.dtype) -> Tensor:
        """The result of rows without a valid token: 0 if they are masked, else NaN."""
        zeros = torch.zeros(self.ids.shape, dtype=dtype, device=self.ids.device)
        return zeros.masked_fill(self.live & ~self.good, float("nan"))


def row_results(z: Tensor, rows: Rows, want_entropy: bool) -> Tensor:
    """[5, rows]: logp, entropy (0 unless it is wanted), lse, and (m, s) for the backward. z [rows, V] is not
    yet divided by the temperature, and finite in rows without a valid token."""
    m = z.amax(-1)
    at_token = z.gather(-1, rows.tokens())[:, 0]
    u = (z - torch.where(m == -INF, 0.0, m)[:, None]) / rows.divisor
    e = u.exp()
    s = e.sum(-1)
    log_s = s.log()
    entropy = torch.zeros_like(s)
    if want_entropy:
        entropy = log_s - torch.where(e == 0, 0.0, e * u).sum(-1) / s
    logp = (at_token - m) / rows.temperature - log_s
    lse = torch.where(m == INF, m, m / rows.temperature + log_s)
    filled = (torch.where(rows.good, x, rows.fill(z.dtype)) for x in (logp, entropy, lse, m))
    return torch.stack((*filled, torch.where(rows.good, s, 1.0)))


def dlogits(
    z: Tensor, rows: Rows, stats: Tensor, entropy: Tensor,
    dlogp: Tensor, dentropy: Tensor | None, dlse: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of z / temperature, z [rows, V], from stats [2, rows] and the rows' other numbers."""
    m, s = (x[:, None] for x in stats)
    u = (z - m) / rows.divisor
    p = u.exp() / s
    dz = p * (dlse - dlogp)[:, None]
    if dentropy is not None:
        log_p = torch.where(p == 0, 0.0, u - s.log())
        dz -= p * (log_p + entropy[:, None]) * dentropy[:, None]
    return dz.scatter_add_(-1, rows.tokens(), dlogp[:, None].to(dz.dtype))
