"""Seating plans: integer tables from labels, orders and counts. Pure torch, no host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from .._types import Buckets


def valid_first(keys_to_sort: Tensor, valid: Tensor) -> Tensor:
    """A stable order of positions by key with the invalid ones last: (... n)."""
    if keys_to_sort.is_floating_point():
        keys_to_sort = keys_to_sort.masked_fill(~valid, float("inf"))
    else:
        keys_to_sort = keys_to_sort.masked_fill(~valid, torch.iinfo(keys_to_sort.dtype).max)
    return keys_to_sort.argsort(dim=-1, stable=True)


def cut(order: Tensor, start: Tensor, stop: Tensor, seats: int) -> Tensor:
    """Seat ``order[start:stop]`` in each bucket: order (b h n), start and stop (b 1 g) -> (b h g seats)."""
    rank = start.unsqueeze(-1) + torch.arange(seats, device=order.device)
    taken = rank < stop.unsqueeze(-1)
    rank = torch.where(taken, rank, 0).expand(*order.shape[:2], -1, -1)
    return torch.where(taken, order.gather(2, rank.flatten(2)).view_as(rank), -1)


def look_back(table: Tensor, used: Tensor, blocks: int) -> Tensor:
    """Each bucket with the ``blocks - 1`` before it, around the circle of the ``used`` (b) buckets: (b h g blocks*s).

    With fewer used buckets than ``blocks`` nobody is seated twice.
    """
    b, h, g, s = table.shape
    mine = torch.arange(g, device=table.device)
    used = used.view(b, 1)
    seen = []
    for back in range(blocks):
        whose = (mine - back) % used.clamp(min=1)  # (b g)
        rows = table.gather(2, whose.view(b, 1, g, 1).expand(b, h, g, s))
        seen.append(rows.masked_fill(((back >= used) | (mine >= used)).view(b, 1, g, 1), -1))
    return torch.cat(seen, -1)


def ranked(labels: Tensor, clusters: int, turns: bool) -> Tensor:
    """What tokens are sorted by: their labels (b h n) below ``clusters``, and among equals their place in the sequence,
    which every other cluster reads backwards where they take turns. In a dtype no larger than needed: sorts read every
    bit."""
    n = labels.shape[2]
    if not torch.compiler.is_compiling():  # for a length that may be any
        fits = (each for each in (torch.int16, torch.int32) if 2 * clusters * n < torch.iinfo(each).max)
        labels = labels.to(next(fits, torch.int64))
    if not turns:
        return labels
    place = torch.arange(n, dtype=labels.dtype, device=labels.device)
    # pow by its name: torch.compile reads (-1) ** x as -(1 ** x)
    return torch.add(torch.pow(-1, labels) * place, labels, alpha=2 * n)


def blocks(ranks: Tensor, valid: Tensor | None, most: int, many: Tensor | None, look: int) -> tuple[Tensor, Tensor]:
    """Tokens in the order of their ranks (b h n), in ``most`` blocks of one size, or in as ``many`` (b) of them; in
    fewer where those are enough: (b h g s). And each block with the ``look - 1`` before it, around the circle, nobody
    twice: (b h g look*s). valid (b n): where sequences differ in length, their blocks differ in size.
    """
    if valid is None and not torch.compiler.is_compiling():  # which know no length, and fuse what follows from it
        return _equal_blocks(ranks.argsort(dim=-1, stable=True), most, look)
    if valid is None:
        valid = ranks.new_ones((ranks.shape[0], ranks.shape[2]), dtype=torch.bool)
    real, seats = valid.sum(-1), -(-ranks.shape[2] // most) if many is None else most
    wanted = most if many is None else many.clamp(min=1)
    size = ((real + (wanted - 1)) // wanted).clamp(min=1)
    (b, h), device = ranks.shape[:2], ranks.device
    mine, column = torch.arange(most, device=device).unsqueeze(-1), torch.arange(look * seats, device=device)
    back, seat = column // seats, column % seats
    real, size = real.view(b, 1, 1), size.view(b, 1, 1)
    used = ((real + (size - 1)) // size).clamp(min=1)
    rank = (mine - back) % used * size + seat  # (b g look*seats)
    taken = ((seat < size) & (rank < real) & (torch.maximum(mine, back) < used)).unsqueeze(1)
    rank = (rank.unsqueeze(1) * taken).expand(b, h, -1, -1)
    order = valid_first(ranks, valid.unsqueeze(1))
    keys = order.gather(2, rank.flatten(2)).view_as(rank).masked_fill(~taken, -1)
    return keys[..., :seats], keys


def _equal_blocks(order: Tensor, most: int, look: int) -> tuple[Tensor, Tensor]:
    """``blocks`` of everybody: their size is known beforehand, and two launches make them."""
    b, h, n = order.shape
    size = -(-n // most)
    g = -(-n // size)
    padded = order if g * size == n else torch.nn.functional.pad(order, (0, g * size - n), value=-1)
    table = padded.view(b, h, g, size)
    return table, torch.cat([table.roll(back, 2) if back else table for back in range(min(look, g))], -1)


def tiles(labels: Tensor, clusters: int, seats: int) -> tuple[Tensor, Tensor]:
    """Queries of one cluster in tiles of ``seats``: the table (b h g seats), and each cluster's first tile (b h c+1).

    g = ceil(n / seats) + clusters is always enough, whatever the labels; label -1 is seated nowhere.
    """
    b, h, n = labels.shape
    g = (n + seats - 1) // seats + clusters
    home = torch.where(labels < 0, clusters, labels)  # the homeless sort last
    home, order = home.sort(dim=-1, stable=True)
    counts = torch.zeros(b, h, clusters + 1, dtype=torch.int64, device=labels.device)
    counts = counts.scatter_add(2, home, torch.ones_like(home))
    before = counts.cumsum(-1) - counts
    tiles_of = (counts + seats - 1) // seats
    last_tile = tiles_of.cumsum(-1)
    place = torch.arange(n, device=labels.device) - before.gather(2, home)
    seat = (last_tile - tiles_of).gather(2, home) * seats + place
    seat = torch.where(home == clusters, g * seats, seat)  # one spare seat swallows them
    table = torch.full((b, h, g * seats + 1), -1, dtype=torch.int64, device=labels.device)
    table = table.scatter(2, seat, order)[..., : g * seats].view(b, h, g, seats)
    return table, torch.cat([torch.zeros_like(last_tile[..., :1]), last_tile[..., :clusters]], -1)


def family_of(first: Tensor, g: int) -> Tensor:
    """The cluster of each of g tiles, from each cluster's first tile (b h c+1): (b h g). Unused tiles: the last one."""
    tile = torch.arange(g, device=first.device).expand(*first.shape[:2], g).contiguous()
    return (torch.searchsorted(first, tile, right=True) - 1).clamp(max=first.shape[-1] - 2)


def hide(keys: Tensor, key_mask: Tensor | None) -> Tensor:
    """Empty the seats of masked keys: keys (b h g z), key_mask (b m)."""
    if key_mask is None:
        return keys
    b, h, g, z = keys.shape
    real = key_mask.gather(1, keys.clamp(min=0).reshape(b, -1)).view(b, h, g, z)
    return torch.where(real, keys, -1)


def everyone(b: int, h: int, n: int, m: int, device: torch.device) -> Buckets:
    """One bucket for all: exact attention."""
    queries, keys = torch.arange(n, device=device), torch.arange(m, device=device)
    return Buckets(queries.expand(b, h, 1, n), keys.expand(b, h, 1, m))
