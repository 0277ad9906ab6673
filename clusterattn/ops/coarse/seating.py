"""Keys seated part by part in tiles of equal size: the first tile of every part, then the other tiles of large parts.

A sum over a part is so the product of its first tile, and what few tiles there are beside are added to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..merge import NEVER


@dataclass(frozen=True)
class Keys:
    """Keys and values by key head, (lead m ...): as they came, or seated."""

    k: Tensor
    v: Tensor
    real: Tensor | None  # (lead m): False for masked keys and empty seats
    at: Tensor | None  # (lead m): where they came from, None where they were not moved; -1 for an empty seat
    more: Tensor | None  # (lead g): the part of each tile that is not its part's first one
    parts: int

    @property
    def tiles(self) -> int:
        return 1 if self.more is None else self.parts + self.more.shape[1]

    def _rows(self, heads: slice) -> Tensor:
        """Of each tile that is not a first one, the number of its part, counted over these heads."""
        assert self.more is not None
        each = self.more[heads]
        return (each + torch.arange(len(each), device=each.device).unsqueeze(-1) * self.parts).flatten()

    def summed(self, by_tile: Tensor, heads: slice) -> Tensor:
        """(lead tiles ...) -> (lead parts ...): tiles of one part added up."""
        if self.more is None or not self.more.shape[1]:
            return by_tile
        total, rest = by_tile[:, : self.parts].clone(), by_tile[:, self.parts :]
        total.flatten(0, 1).index_add_(0, self._rows(heads), rest.flatten(0, 1))
        return total

    def product(self, weights: Tensor, x: Tensor, heads: slice) -> Tensor:
        """weights (lead tiles rows seats), x (lead seen width) -> (lead parts rows width)"""
        x = x.view(x.shape[0], weights.shape[1], -1, x.shape[-1])
        total = _each(weights[:, : self.parts], x[:, : self.parts])
        if self.more is not None and self.more.shape[1]:
            rest = _each(weights[:, self.parts :], x[:, self.parts :])
            total.flatten(0, 1).index_add_(0, self._rows(heads), rest.flatten(0, 1))
        return total

    def highest(self, by_tile: Tensor, heads: slice) -> Tensor:
        if self.more is None:
            return by_tile
        more = self.more[heads].unsqueeze(-1).expand(-1, -1, by_tile.shape[2])
        return by_tile[:, : self.parts].clone().scatter_reduce_(1, more, by_tile[:, self.parts :], "amax")

    def of_tiles(self, by_part: Tensor, heads: slice) -> Tensor:
        """(lead parts ...) -> (lead tiles ...): what each tile's part has."""
        if self.more is None or not self.more.shape[1]:
            return by_part
        rest = by_part.flatten(0, 1).index_select(0, self._rows(heads))
        return torch.cat([by_part, rest.view(by_part.shape[0], -1, *by_part.shape[2:])], 1)

    def places(self, m: int) -> Tensor | None:
        """Where each of the m keys was seated (lead m)."""
        if self.at is None:
            return None
        seat = torch.arange(self.at.shape[1], device=self.at.device).expand_as(self.at)
        spare = torch.zeros(self.at.shape[0], m + 1, dtype=torch.int64, device=self.at.device)
        return spare.scatter_(1, torch.where(self.at < 0, m, self.at), seat)[:, :m]

    def moved_back(self, x: Tensor, m: int) -> Tensor:
        """What belongs to the seats (lead seen width), for the keys as they came: (lead m width)."""
        if self.at is None:
            return x
        total = x.new_zeros(x.shape[0], m + 1, x.shape[-1])
        index = torch.where(self.at < 0, m, self.at).unsqueeze(-1).expand_as(x)
        return total.scatter_(1, index, x)[:, :m].contiguous()


def _each(weights: Tensor, x: Tensor) -> Tensor:
    """Tile by tile (lead tiles rows width). One head after another: a product of all at once would copy the weights,
    since the tiles lie side by side in a row."""
    if weights.shape[1] == 1:
        return torch.bmm(weights[:, 0], x[:, 0]).unsqueeze(1)
    found = weights.new_empty(*weights.shape[:3], x.shape[-1])
    for one, mine, theirs in zip(found, weights, x, strict=True):
        torch.bmm(mine, theirs, out=one)
    return found


def seated(k: Tensor, v: Tensor, key_mask: Tensor | None, part_of: Tensor | None, parts: int) -> Keys:
    """k (b hk m d), v (b hk m e), key_mask (b m), part_of (b hk m) with -1 for keys that are not real."""
    (b, hk, m, d), e = k.shape, v.shape[3]
    k, v = k.reshape(b * hk, m, d), v.reshape(b * hk, m, e)
    if part_of is None:
        return Keys(k, v, None if key_mask is None else key_mask.repeat_interleave(hk, 0), None, None, 1)
    at, more = _table(part_of.reshape(b * hk, m), parts, max(8, min(64, 1 << (m // (2 * parts)).bit_length())))
    rows = (at.clamp(min=0) + torch.arange(b * hk, device=k.device).unsqueeze(-1) * m).reshape(-1)

    def moved(x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1]).index_select(0, rows).view(*at.shape, x.shape[-1])

    return Keys(moved(k), moved(v), at >= 0, at, more, parts)


def _table(part_of: Tensor, parts: int, seats: int) -> tuple[Tensor, Tensor]:
    """The key on each seat (lead tiles*seats), -1 where there is none, and the parts of the tiles that are not first."""
    lead, m = part_of.shape
    home, order = torch.where(part_of < 0, parts, part_of).sort(dim=-1, stable=True)  # the homeless sort last
    counts = torch.zeros(lead, parts + 1, dtype=torch.int64, device=home.device)
    counts = counts.scatter_add_(1, home, torch.ones_like(home))
    more = (counts - 1).clamp_(min=0) // seats
    more[:, parts] = 0
    last = more.cumsum(-1)
    # On a CPU it is known without waiting how many tiles are used: there are no spare ones.
    spare = int(last[:, -1].max()) if home.device.type == "cpu" and lead else m // seats
    place = torch.arange(m, device=home.device) - (counts.cumsum(-1) - counts).gather(1, home)
    nth = place // seats
    tile = torch.where(nth == 0, home, (last - more).gather(1, home) + nth + (parts - 1))
    seat = torch.where(home == parts, (parts + spare) * seats, tile * seats + place % seats)  # one swallows them
    table = torch.full((lead, (parts + spare) * seats + 1), -1, dtype=torch.int64, device=home.device)
    table = table.scatter_(1, seat, order)[:, :-1]
    tiles = torch.arange(spare, device=home.device).expand(lead, spare).contiguous()
    return table, torch.searchsorted(last[:, :parts].contiguous(), tiles, right=True).clamp_(max=parts - 1)
