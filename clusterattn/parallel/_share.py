"""One rank's share of a sequence, and drawing from the whole of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import draw
from ._collectives import Ranks


@dataclass(frozen=True)
class Share:
    """The tokens that this rank holds, and where they stand among all."""

    valid: Tensor  # (b n) bool, of the tokens held here
    length: int  # of the whole sequence, padding included
    numbers: Tensor  # (b n): of every valid token among those of all ranks, rising; padding repeats what it follows
    totals: tuple[int, ...]  # valid tokens of each sequence, on all ranks
    ranks: Ranks

    def numbered(self) -> Tensor:
        """(b 1 n): the rank of every valid token among those of all ranks, -1 elsewhere."""
        return torch.where(self.valid, self.numbers, -1).unsqueeze(1)

    def draw(self, seed: draw.Seed, stream: int, most: int) -> tuple[Tensor, Tensor]:
        """The draw of ops.draw from the whole sequence, which every rank knows without asking: for each lot (b most)
        where its token is held here, -1 if elsewhere; and whether there is one at all."""
        drawn = torch.stack([draw.stratified(self.valid, total, seed, stream, most) for total in self.totals])
        return self.held_at(drawn), drawn >= 0

    def held_at(self, numbers: Tensor) -> Tensor:
        """Where the tokens of these numbers (b s) are held here, -1 if elsewhere."""
        at = torch.searchsorted(self.numbers, numbers.contiguous()).clamp(max=self.numbers.shape[-1] - 1)
        mine = (numbers >= 0) & (self.numbers.gather(-1, at) == numbers)
        return torch.where(mine, at, -1)

    def gather(self, x: Tensor, at: Tensor, what: str) -> Tensor:
        """Rows of x (b h n d) from whoever holds them: at (b s) from ``draw`` -> (b h s d), 0 for nobody's. Exact: all
        but one of the numbers that are added up are 0. Without gradient."""
        return self.ranks.reduce(rows_at(x, at), what)


def rows_at(x: Tensor, at: Tensor) -> Tensor:
    """x (b h n d), at (b s) -> (b h s d), 0 for -1."""
    index = at.clamp(min=0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return torch.where((at >= 0)[:, None, :, None], x.gather(2, index), x.new_zeros(()))


def lots(real: Tensor, heads: int) -> Tensor:
    """Gathered rows as positions: (b s) -> (b heads s), -1 for nobody's."""
    each = torch.where(real, torch.arange(real.shape[-1], device=real.device), -1)
    return each.unsqueeze(1).expand(-1, heads, -1)


def at_least_one(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A rank without tokens holds one that is not real: it has to take part in every sum."""
    if x.shape[2]:
        return x, mask
    return F.pad(x, (0, 0, 0, 1)), torch.zeros(x.shape[0], 1, dtype=torch.bool, device=x.device)
