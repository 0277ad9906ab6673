"""Queries of one cluster seated in tiles: what of them is worked on at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tables
from .._chunks import spans

MOST = 256  # seats of a tile
LONG = 1024  # queries of a head from which on its clusters are worth to be sorted by size

Seated = tuple[slice, Tensor, Tensor, Tensor]
"""Heads of (b h); rows (g s) into (b h n), any row for an empty seat; which are real (g s); the tiles' clusters (g)
into (b h c)."""


@dataclass(frozen=True)
class Limits:
    """How many numbers may be held at once, and how many a seat and a tile take."""

    most: int
    seat: int
    tile: int

    def tiles(self, seats: int) -> int:
        return max(1, self.most // (seats * self.seat + self.tile))


def in_tiles(labels: Tensor, clusters: int, limits: Limits) -> Iterator[Seated]:
    """Tiles of one size, about half a cluster, so that few seats stay empty."""
    b, h, n = labels.shape
    seats = max(8, min(128, 1 << max(n // (2 * max(clusters, 1)), 1).bit_length()))
    table, first = tables.tiles(labels, clusters, seats)
    lead, g = b * h, table.shape[2]
    head = torch.arange(lead, device=labels.device).view(lead, 1)
    cluster = tables.family_of(first, g).view(lead, g) + head * clusters
    table = table.view(lead, g, seats)
    rows = table.clamp(min=0) + head.unsqueeze(-1) * n
    used = [g] * b  # on a CPU it is known without waiting how many tiles are: spare ones go, each sequence's by itself
    if labels.device.type == "cpu" and lead:
        used = [max(1, int(each)) for each in first[..., -1].amax(1)]
    most = limits.tiles(seats)
    pieces = (
        (slice(one * h + heads.start, one * h + heads.stop), tiles)
        for one, many in enumerate(used)
        for heads in spans(h, most // many)
        for tiles in spans(many, many if heads.stop - heads.start > 1 else most)
    )
    for heads, tiles in pieces:
        real = (table[heads, tiles] >= 0).flatten(0, 1)
        yield heads, rows[heads, tiles].flatten(0, 1), real, cluster[heads, tiles].flatten()


def by_size(labels: Tensor, clusters: int, limits: Limits) -> Iterator[Seated]:
    """Clusters of a head that are about of one size together, a tile for each (large ones have several), where sizes
    are known without waiting. No head feels another's: what a machine gets does not depend on which heads it has."""
    b, h, n = labels.shape
    lead = b * h
    home = torch.where(labels < 0, clusters, labels).view(lead, n)  # the homeless sort last
    home, order = home.sort(dim=-1, stable=True)
    counts = torch.zeros(lead, clusters + 1, dtype=torch.int64).scatter_add_(1, home, torch.ones_like(home))
    head = torch.arange(lead).unsqueeze(-1)
    order, begin = (order + head * n).view(-1), (counts.cumsum(-1) - counts + head * n)[:, :clusters].reshape(-1)
    counts = counts[:, :clusters].reshape(-1)
    many = (counts + MOST - 1) // MOST  # tiles of a cluster, as equal as can be
    cluster = torch.arange(lead * clusters).repeat_interleave(many)
    nth = torch.arange(len(cluster)) - (many.cumsum(0) - many)[cluster]
    first, last = (counts[cluster] * each // many[cluster] for each in (nth, nth + 1))
    size, begin = last - first, begin[cluster] + first
    owner = cluster // clusters
    ranked = (owner * (n + 1) - size).argsort(stable=True)
    cluster, size, begin, owner = (x[ranked] for x in (cluster, size, begin, owner))
    sizes, owners = size.tolist(), owner.tolist()
    for tiles in _runs(sizes, owners, limits):
        seat = torch.arange(sizes[tiles.start])
        real = seat < size[tiles].unsqueeze(-1)
        rows = order[torch.where(real, seat, 0) + begin[tiles].unsqueeze(-1)]
        one = owners[tiles.start]
        yield slice(one, one + 1), rows, real, cluster[tiles]


def _runs(sizes: list[int], owners: list[int], limits: Limits) -> Iterator[slice]:
    """Tiles of one owner, of sizes that fall, in runs within the limits, the smallest half as large as the first."""
    start = 0
    while start < len(sizes):
        most, stop = sizes[start], start + 1
        end = min(len(sizes), start + limits.tiles(most))
        while stop < end and owners[stop] == owners[start] and 2 * sizes[stop] >= most:
            stop += 1
        yield slice(start, stop)
        start = stop
