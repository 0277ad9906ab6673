"""Keys part by part: in runs, where the parts' sizes are known without waiting; or in tiles of equal size.

Tiles: the first tile of every part, then the other tiles of large parts. A sum over a part is so the product of its
first tile, and what few tiles there are beside are added to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._chunks import LOG2_E
from ..merge import NEVER, finite

WORTH = 1 << 16  # multiply-adds of a run's scores: with fewer, calls take longer than what they do


def _weigh_(scores: Tensor) -> Tensor:
    """Scores of one part (... rows seen) become weights, whose sum is one; their log-sum-exp (... rows)."""
    highest = scores.amax(-1, keepdim=True)
    total = scores.sub_(finite(highest)).exp_().sum(-1, keepdim=True)
    scores.mul_(torch.where(total > 0, 1 / total, 1.0))
    return total.log_().add_(highest).squeeze(-1)


@dataclass(frozen=True)
class Keys:
    """Keys and values by key head, (lead m ...), as they came: one part."""

    k: Tensor
    v: Tensor
    real: Tensor | None  # (lead m): False for masked keys and empty seats
    at: Tensor | None  # (lead m): where they came from, None where they were not moved; -1 for an empty seat
    parts: int

    def heads(self, most: int) -> int:
        """How many heads may be worked on at once."""
        return most

    def weigh_(self, scores: Tensor, heads: slice) -> Tensor:
        """Scores (heads rows seen) become weights, whose sum over every part is one, or 0 where nothing is seen; the
        log-sum-exp of the parts (heads rows parts)."""
        return _weigh_(scores).unsqueeze(-1)

    def mean(self, weights: Tensor, x: Tensor, heads: slice, out: Tensor) -> None:
        """weights (heads (group rows) seen), x (heads seen width) -> out (heads group rows parts width)"""
        out.copy_(torch.bmm(weights, x).view(out.shape))

    def received(self, weights: Tensor, amount: Tensor, heads: slice) -> Tensor:
        """omega (heads group seen): what each key receives of the far attention, from weights (heads group rows seen)
        and each row's amount for the weight of a part (heads group rows parts)."""
        return (amount.mT @ weights).squeeze(2)


@dataclass(frozen=True)
class Runs(Keys):
    """Keys sorted by part: every part a run of them. One head at a time: another's runs are others."""

    sizes: list[list[int]]  # for each head, those of its parts, and how many keys are left over

    def heads(self, most: int) -> int:
        return 1

    def weigh_(self, scores: Tensor, heads: slice) -> Tensor:
        runs = scores.mul_(LOG2_E).split_with_sizes(self.sizes[heads.start], -1)
        shape = (self.parts, *scores.shape[:2], 1)
        highest, total = scores.new_full(shape, NEVER), scores.new_empty(shape)
        for run, found in zip(runs, highest, strict=False):
            if run.shape[-1]:
                torch.amax(run, -1, keepdim=True, out=found)
        for run, level in zip(runs, finite(highest), strict=False):
            run.sub_(level)
        scores.exp2_()
        for run, found in zip(runs, total, strict=False):
            torch.sum(run, -1, keepdim=True, out=found)
        for run, shrink in zip(runs, torch.where(total > 0, 1 / total, 1.0), strict=False):
            run.mul_(shrink)
        runs[-1].zero_()
        return total.log2_().add_(highest).mul_(1 / LOG2_E).squeeze(-1).movedim(0, -1)

    def mean(self, weights: Tensor, x: Tensor, heads: slice, out: Tensor) -> None:
        sizes = self.sizes[heads.start]
        theirs = x[0].split_with_sizes(sizes)
        for mine, to in zip(weights[0].view(*out.shape[1:3], -1), out[0], strict=True):
            for run, rows, found in zip(mine.split_with_sizes(sizes, -1), theirs, to.unbind(1), strict=False):
                torch.mm(run, rows, out=found)

    def received(self, weights: Tensor, amount: Tensor, heads: slice) -> Tensor:
        sizes, omega = self.sizes[heads.start], weights.new_zeros(*weights.shape[:2], 1, weights.shape[-1])
        for mine, theirs, to in zip(weights[0], amount[0].mT.unsqueeze(2), omega[0], strict=True):
            runs = mine.split_with_sizes(sizes, -1), theirs, to.split_with_sizes(sizes, -1)
            for run, share, found in zip(*runs, strict=False):
                torch.mm(share, run, out=found)
        return omega.squeeze(2)


@dataclass(frozen=True)
class Tiles(Keys):
    more: Tensor | None  # (lead g): the part of each tile that is not its part's first one; None: there is one part

    @property
    def tiles(self) -> int:
        return 1 if self.more is None else self.parts + self.more.shape[1]

    def tiled(self, x: Tensor) -> Tensor:
        """(heads rows seen) -> (heads tiles rows seats)"""
        return x.view(*x.shape[:2], self.tiles, -1).transpose(1, 2)

    def _rows(self, heads: slice) -> Tensor:
        """Of each tile that is not a first one, the number of its part, counted over these heads."""
        assert self.more is not None
        each = self.more[heads]
        return (each + torch.arange(len(each), device=each.device).unsqueeze(-1) * self.parts).flatten()

    def summed(self, by_tile: Tensor, heads: slice) -> Tensor:
        """(lead tiles ...) -> (lead parts ...): tiles of one part added up."""
        if self.more is None or not self.more.shape[1]:
            return by_tile
        total, rest = by_tile[:, : self.parts].contiguous(), by_tile[:, self.parts :]
        total.flatten(0, 1).index_add_(0, self._rows(heads), rest.flatten(0, 1))
        return total

    def of_tiles(self, by_part: Tensor, heads: slice) -> Tensor:
        """(lead parts ...) -> (lead tiles ...): what each tile's part has."""
        if self.more is None or not self.more.shape[1]:
            return by_part
        rest = by_part.flatten(0, 1).index_select(0, self._rows(heads))
        return torch.cat([by_part, rest.view(by_part.shape[0], -1, *by_part.shape[2:])], 1)

    def weigh_(self, scores: Tensor, heads: slice) -> Tensor:
        if self.more is None:
            return super().weigh_(scores, heads)
        tiled = self.tiled(scores)
        by_tile, more = tiled.amax(-1), self.more[heads].unsqueeze(-1)
        highest = by_tile[:, : self.parts].clone()  # (heads parts rows)
        rest = by_tile[:, self.parts :]
        highest.scatter_reduce_(1, more.expand_as(rest), rest, "amax")
        weights = tiled.sub_(self.of_tiles(finite(highest), heads).unsqueeze(-1)).exp_()
        total = self.summed(weights.sum(-1), heads)
        weights.mul_(self.of_tiles(torch.where(total > 0, 1 / total, 1.0), heads).unsqueeze(-1))
        return (total.log() + highest).mT

    def mean(self, weights: Tensor, x: Tensor, heads: slice, out: Tensor) -> None:
        if self.more is None:
            return super().mean(weights, x, heads, out)
        found = self.tiled(weights) @ x.view(x.shape[0], self.tiles, -1, x.shape[-1])
        out.copy_(self.summed(found, heads).transpose(1, 2).reshape(out.shape))
        return None

    def received(self, weights: Tensor, amount: Tensor, heads: slice) -> Tensor:
        group, rows = weights.shape[1:3]
        each = self.of_tiles(amount.flatten(1, 2).mT, heads)
        each = each.view(*each.shape[:2], group, rows)
        tiled = weights.view(*weights.shape[:3], self.tiles, -1)
        return torch.einsum("hgrts,htgr->hgts", tiled, each).flatten(2)

    def places(self, m: int) -> Tensor | None:
        """Where each of the m keys was seated (lead m); anywhere for those that are not real."""
        return None if self.at is None else _seats(self.at, m).clamp_(min=0)


def _seats(at: Tensor, m: int) -> Tensor:
    """Of keys at these seats, (lead seats): the seat of each of the m keys (lead m), -1 for those that have none."""
    seat = torch.arange(at.shape[1], device=at.device).expand_as(at)
    spare = torch.full((at.shape[0], m + 1), -1, dtype=torch.int64, device=at.device)
    return spare.scatter_(1, torch.where(at < 0, m, at), seat)[:, :m]


def moved_back(x: Tensor, at: Tensor | None, m: int) -> Tensor:
    """What belongs to the seats (lead seen width), for the keys as they came: (lead m width)."""
    if at is None:
        return x
    seat = _seats(at, m)
    return _moved(x.unsqueeze(1), seat).masked_fill_((seat < 0).unsqueeze(-1), 0)


def _as_they_came(k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    real = None if key_mask is None else key_mask.repeat_interleave(k.shape[1], 0)
    return k.flatten(0, 1), v.flatten(0, 1), real


def _moved(x: Tensor, at: Tensor) -> Tensor:
    """The rows of x (b hk m width) at (lead seats); any row for -1."""
    rows = at.clamp(min=0) + torch.arange(at.shape[0], device=x.device).unsqueeze(-1) * x.shape[2]
    return x.reshape(-1, x.shape[-1]).index_select(0, rows.reshape(-1)).view(*at.shape, x.shape[-1])


def seated(k: Tensor, v: Tensor, key_mask: Tensor | None, part_of: Tensor | None, parts: int, rows: int) -> Keys:
    """k (b hk m d), v (b hk m e), key_mask (b m), part_of (b hk m) with -1 for keys that are not real; for so many rows
    of scores of each key head."""
    known = k.device.type == "cpu" and k.numel() > 0
    worth = rows * k.shape[2] * k.shape[3] >= WORTH * parts
    if part_of is None or not known or not worth:
        return in_tiles(k, v, key_mask, part_of, parts)
    return _in_runs(k, v, part_of, parts)


def _in_runs(k: Tensor, v: Tensor, part_of: Tensor, parts: int) -> Runs:
    home = torch.where(part_of < 0, parts, part_of).flatten(0, 1)  # those that are not real sort last
    home, at = home.sort(dim=-1, stable=True)
    sizes = torch.zeros(home.shape[0], parts + 1, dtype=torch.int64).scatter_add_(1, home, torch.ones_like(home))
    real = home < parts if bool(sizes[:, parts].any()) else None
    return Runs(_moved(k, at), _moved(v, at), real, at, parts, sizes.tolist())


def in_tiles(k: Tensor, v: Tensor, key_mask: Tensor | None, part_of: Tensor | None, parts: int) -> Tiles:
    """As seated, and nobody waits for how many tiles there are."""
    if part_of is None:
        return Tiles(*_as_they_came(k, v, key_mask), None, 1, None)
    m = k.shape[2]
    at, more = _table(part_of.flatten(0, 1), parts, max(8, min(64, 1 << (m // (2 * parts)).bit_length())))
    return Tiles(_moved(k, at), _moved(v, at), at >= 0, at, parts, more)


def _table(part_of: Tensor, parts: int, seats: int) -> tuple[Tensor, Tensor]:
    """The key on each seat (lead tiles*seats), -1 where there is none, and the parts of tiles that are not first."""
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
