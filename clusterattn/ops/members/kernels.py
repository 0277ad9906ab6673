"""A counting sort by label, and sums over the sorted: no atomics, the same bits every time.

Stretches of 256 rows are sorted in registers; how many rows of each cluster every stretch holds says where
its rows go.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._jit import in_turn, jit, power, rows, tl
from .._launch import cdiv, launch, workspace

STRETCH = 256
RANKED = 1024  # parts at most that are sorted by size


@jit
def _homes(LABELS, lead, at, n, c, width):
    """The cluster of each row: c for those without one, c + 1 past the end."""
    label = tl.load(LABELS + lead * n + at, mask=at < n, other=0).to(tl.int32)
    return tl.where(at < n, tl.where(label < 0, c, label // width), c + 1)


@jit
def count_kernel(LABELS, COUNTS, n, c, width, stretches, BN: tl.constexpr, BC: tl.constexpr):
    """COUNTS (lead stretches c+1): the rows of each cluster in each stretch."""
    in_turn()
    stretch, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    which = tl.arange(0, BC)
    count = tl.histogram(_homes(LABELS, lead, stretch * BN + tl.arange(0, BN), n, c, width), BC)
    tl.store(COUNTS + (lead * stretches + stretch) * (c + 1) + which, count, mask=which <= c)


@jit
def scan_kernel(COUNTS, TOTAL, c, stretches, BS: tl.constexpr, BC: tl.constexpr):
    """COUNTS becomes, for each stretch and cluster, how many of the cluster's rows stand in stretches before it; TOTAL
    (lead c+1) how many there are. A few clusters to a program."""
    in_turn()
    lead, part = tl.program_id(1).to(tl.int64), tl.arange(0, BS)
    which = tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros((BC,), tl.int32)
    for first in range(0, stretches, BS):
        row = lead * stretches + first + part
        mask = (first + part < stretches)[:, None] & (which <= c)[None, :]
        place = COUNTS + row[:, None] * (c + 1) + which[None, :]
        count = tl.load(place, mask=mask, other=0)
        tl.store(place, total[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        total += tl.sum(count, 0)
    tl.store(TOTAL + lead * (c + 1) + which, total, mask=which <= c)


@jit
def place_kernel(
    LABELS, BEFORE, TOTAL, FIRST, ORDER, PLACE, LARGEST, n, c, width, stretches,
    PARTS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """ORDER (lead n), and FIRST (lead c+2): where each cluster begins. PARTS: also PLACE (lead n), where each row
    stands in the order, and LARGEST (lead c), the clusters by size; of more than MOST as they come."""
    in_turn()
    stretch, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at, which = tl.arange(0, BN), tl.arange(0, BC)
    homes = _homes(LABELS, lead, stretch * BN + at, n, c, width)
    total = tl.load(TOTAL + lead * (c + 1) + which, mask=which <= c, other=0)
    begin = tl.cumsum(total, 0) - total
    if stretch == 0:
        tl.store(FIRST + lead * (c + 2) + which, begin, mask=which <= c + 1)  # past the last cluster: all rows
        if PARTS:
            ranked = which
            if BC <= MOST:  # who is not there comes last
                ranked = tl.sort(tl.where(which < c, total, -1).to(tl.int64) * BC + (BC - 1 - which), descending=True)
                ranked = BC - 1 - (ranked % BC).to(tl.int32)
            tl.store(LARGEST + lead * c + which, ranked, mask=which < c)
    mine = tl.histogram(homes, BC)
    begin += tl.load(BEFORE + (lead * stretches + stretch) * (c + 1) + which, mask=which <= c, other=0)
    begin -= tl.cumsum(mine, 0) - mine  # the rows of other clusters that stand before them in the sorted stretch
    sorted_rows = tl.sort(homes * BN + at)
    home, row = sorted_rows // BN, sorted_rows % BN
    place, row = tl.gather(begin, home, 0) + at, stretch * BN + row
    tl.store(ORDER + lead * n + place, row, mask=home <= c)
    if PARTS:
        tl.store(PLACE + lead * n + row, place, mask=home <= c)


def by_label(labels: Tensor, clusters: int, width: int = 1) -> tuple[Tensor, Tensor]:
    """labels (lead n) -> order (lead n), first (lead c+2), both int32: cluster i holds order[first[i] : first[i+1]].

    width: so many labels that follow each other are one cluster.
    """
    order, first, _, _ = members(labels, clusters, False, width)
    return order, first


def members(labels: Tensor, clusters: int, parts: bool, width: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``by_label``; and, for parts, place (lead n) and largest (lead c), see Members."""
    labels = labels.contiguous()
    lead, n = labels.shape
    tile = min(STRETCH, power(n))
    stretches = cdiv(n, tile)
    counts, total = workspace(
        labels.device, ((lead, stretches, clusters + 1), torch.int32), ((lead, clusters + 1), torch.int32)
    )
    first = torch.empty(lead, clusters + 2, dtype=torch.int32, device=labels.device)
    order = torch.empty(lead, n, dtype=torch.int32, device=labels.device)
    place, largest = (order.new_empty(lead, size if parts else 0) for size in (n, clusters))
    wide = power(clusters + 2)
    sizes = (n, clusters, width, stretches)
    launch(count_kernel, (stretches, lead), (labels, counts), sizes, BN=tile, BC=wide, num_warps=4)
    few, across = 32 if stretches <= 32 else 128, min(32, wide)
    launch(
        scan_kernel, (cdiv(clusters + 1, across), lead), (counts, total), (clusters, stretches), BS=few, BC=across,
        num_warps=4,
    )  # fmt: skip
    launch(
        place_kernel, (stretches, lead), (labels, counts, total, first, order, place, largest), sizes, PARTS=parts,
        BN=tile, BC=wide, MOST=RANKED, num_warps=4 if wide <= 1024 else 8,
    )  # fmt: skip
    return order, first, place, largest


@jit
def member_sums_kernel(
    X, ORDER, FIRST, SUMS, COUNTS, n, d, c, heads, splits, sxb, sxh, sxn, BN: tl.constexpr, BD: tl.constexpr
):
    """SUMS (lead splits c d), COUNTS (lead splits c): a program takes every splits-th tile of a cluster's members."""
    in_turn()
    which, split, lead = tl.program_id(0) // splits, tl.program_id(0) % splits, tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BD)
    begin, end = tl.load(FIRST + lead * (c + 2) + which), tl.load(FIRST + lead * (c + 2) + which + 1)
    base = X + (lead // heads) * sxb + (lead % heads) * sxh
    total, count = tl.zeros((BD,), tl.float32), tl.zeros((BN,), tl.float32)
    for turn in range(begin + split * BN, end, splits * BN):
        place = turn + tl.arange(0, BN)
        real = place < end
        row = tl.load(ORDER + lead * n + tl.minimum(place, end - 1)).to(tl.int64)
        x = tl.load(base + row[:, None] * sxn + dims[None, :], mask=real[:, None] & (dims < d)[None, :], other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
        count += real.to(tl.float32)
    out = (lead * splits + split) * c + which
    tl.store(SUMS + out * d + dims, total, mask=dims < d)
    tl.store(COUNTS + out, tl.sum(count, 0))


def tiles(n: int, clusters: int, most: int) -> tuple[int, int]:
    """How many members a program takes at once, and how many programs share a cluster, by a cluster's mean size.

    More programs than the mean needs: clusters differ, and one that finds nothing to do costs little.
    """
    each = max(1, n // max(clusters, 1))
    tile = min(most, power(each * 3 // 4))
    return tile, max(1, min(16, each // tile))


@jit
def turns_kernel(FIRST, TURNS, TURN_FIRST, c, turns, BS: tl.constexpr, BC: tl.constexpr):
    """See Turns; a program for each head."""
    in_turn()
    lead, before = tl.program_id(0).to(tl.int64), 0
    first_of, list_of = lead * (c + 2), lead * turns * 3
    for start in range(0, c + 1, BC):
        which = start + tl.arange(0, BC)
        here = which <= c
        begin = tl.load(FIRST + first_of + which, mask=here, other=0)
        end = tl.load(FIRST + first_of + which + 1, mask=here, other=0)
        count = (end - begin + BS - 1) // BS
        at = before + tl.cumsum(count, 0) - count
        tl.store(TURN_FIRST + first_of + which, at, mask=here)
        for turn in range(tl.max(count, 0)):
            slot, mine, low = list_of + (at + turn) * 3, turn < count, begin + turn * BS
            tl.store(TURNS + slot, which, mask=mine)
            tl.store(TURNS + slot + 1, low, mask=mine)
            tl.store(TURNS + slot + 2, tl.minimum(low + BS, end), mask=mine)
        before += tl.sum(count, 0)
    tl.store(TURN_FIRST + first_of + c + 1, before)
    for start in range(before * 3, turns * 3, BC):
        rest = start + tl.arange(0, BC)
        tl.store(TURNS + list_of + rest, tl.zeros((BC,), tl.int32), mask=rest < turns * 3)


class Turns(NamedTuple):
    """The sorted rows cut into turns of at most so many, each of one cluster: clusters differ in size, programs that
    take a turn each do not."""

    listed: Tensor  # (lead turns 3): cluster (c: those without one), first row, the one past the last; zeros at the end
    first: Tensor  # (lead c+2): where each cluster's turns begin

    @property
    def most(self) -> int:
        return self.listed.shape[1]


def turns(first: Tensor, n: int, size: int) -> Turns:
    """first (lead c+2): where the clusters begin among the n sorted rows."""
    lead, c = first.shape[0], first.shape[1] - 2
    most = n // size + c + 1
    listed = torch.empty(lead, most, 3, dtype=torch.int32, device=first.device)
    of_cluster = torch.empty(lead, c + 2, dtype=torch.int32, device=first.device)
    launch(
        turns_kernel, (lead,), (first, listed, of_cluster), (c, most),
        BS=size, BC=min(1024, power(c + 1)), num_warps=4,
    )  # fmt: skip
    return Turns(listed, of_cluster)


def sums(x: Tensor, order: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Partial sums (lead splits c d) and counts (lead splits c) over the members of each cluster: x (b h n d)."""
    x = rows(x)
    (b, h, n, d), c = x.shape, first.shape[1] - 2
    tile, splits = tiles(n, c, 32)
    totals = torch.empty(b * h, splits, c, d, dtype=torch.float32, device=x.device)
    counts = torch.empty(b * h, splits, c, dtype=torch.float32, device=x.device)
    launch(
        member_sums_kernel, (c * splits, b * h), (x, order, first, totals, counts),
        (n, d, c, h, splits, *x.stride()[:3]), BN=tile, BD=power(d), num_warps=1,
    )  # fmt: skip
    return totals, counts
