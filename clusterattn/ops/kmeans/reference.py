"""Lloyd's algorithm over points (b h n w), and farthest-first starts. No gradient anywhere. lead = b h in one.

All three metrics assign by the same product, ``argmax_c  x . f(c) - offset(c)``:

    hamming  points and centroids are signs (+1/-1); f(c) = c, offset 0; the update is a bitwise majority
    euclid   f(c) = c,   offset ½ c.c
    keys     f(c) = S c, offset ½ c.S c   with S = Cov(K): the distance between two queries as the keys see it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._chunks import budget, spans, wide
from ..merge import NEVER
from ..rows import broadcast

FEW = 1024  # starts whose mean is the origin: any point among them would do


def _scorer(centroids: Tensor, alive: Tensor, form: Tensor | None, signs: bool) -> tuple[Tensor, Tensor]:
    """The product's right side (lead c w) and its offset (lead c); dead clusters can never win."""
    seen = centroids if form is None else torch.bmm(centroids, form)
    offset = torch.zeros_like(alive, dtype=centroids.dtype) if signs else (centroids * seen).sum(-1).mul_(-0.5)
    return seen, offset.masked_fill_(~alive, NEVER)


def nearest(points: Tensor, right: Tensor, offset: Tensor, origin: Tensor | None, signs: bool = False) -> Tensor:
    """The best centroid of every point (lead n); ties go to the lowest index, with ``signs`` (of codes) or without."""
    points, right = points.flatten(0, 1), right.to(wide(points).dtype)
    return nearest_of([(lambda heads, piece: centred(points, origin, heads, piece).mT, right)], offset, points)


Columns = Callable[[slice, slice], Tensor]  # of some heads and rows: (lead w n)


def nearest_of(sides: Sequence[tuple[Columns, Tensor]], offset: Tensor, like: Tensor) -> Tensor:
    """As nearest, for points whose columns are made side by side when they are looked at, as many as ``like`` has rows
    (lead n …). With each side its right (lead c w)."""
    (lead, n), c = like.shape[:2], offset.shape[1]
    labels = torch.zeros(lead, n, dtype=torch.int64, device=like.device)
    if n == 0 or c == 0:
        return labels
    rows = max(1, min(n, budget(like) // c))
    for heads in spans(lead, budget(like) // (rows * c)):
        for piece in spans(n, rows):
            scores = offset[heads].unsqueeze(-1)
            for columns, right in sides:
                scores = torch.baddbmm(scores, right[heads], columns(heads, piece))
            labels[heads, piece] = _highest(scores)
    return labels


def _highest(scores: Tensor) -> Tensor:
    """Where the columns of scores (lead c n) are highest (lead n), the first place where there are several; nothing is
    left of the scores. torch's own search goes number by number, this one by whole registers: less its highest score a
    column is negative but there, and whole numbers have their sign in the uppermost bit."""
    c, whole = scores.shape[1], torch.int32 if scores.dtype == torch.float32 else torch.int64
    signs = scores.sub_(scores.amax(1, keepdim=True)).view(whole).bitwise_right_shift_(torch.iinfo(whole).bits - 1)
    backwards = torch.arange(c - 1, -1, -1, dtype=whole, device=scores.device).unsqueeze(-1)
    found = signs.bitwise_or_(backwards).amax(1)  # -1 but where the sign is positive
    return (c - 1 - found) % c  # -1 alone where all scores are -inf: the first


def centred(points: Tensor, origin: Tensor | None, heads: slice, piece: slice) -> Tensor:
    """A shared offset of all points says nothing about who is alike, but costs digits: it is taken off first."""
    x = wide(points[heads, piece])
    return x if origin is None else x - origin[heads]


def sums(points: Tensor, labels: Tensor, clusters: int) -> Tensor:
    """Sum of the points of each cluster (lead c w); label -1 is left out. The same bits every time, on any device."""
    lead, n, w = points.shape
    if points.device.type == "cpu":
        bins = torch.where(labels < 0, clusters, labels) + torch.arange(lead, device=points.device).unsqueeze(-1) * (
            clusters + 1
        )
        total = points.new_zeros(lead * (clusters + 1), w).index_add_(0, bins.view(-1), points.reshape(-1, w))
        return total.view(lead, clusters + 1, w)[:, :clusters]
    total = points.new_zeros(lead, clusters, w)  # atomics would change the order of summation from run to run
    for piece in spans(n, budget(points) // max(lead * clusters, 1)):
        chosen = labels[:, piece, None] == torch.arange(clusters, device=points.device)
        total.baddbmm_(chosen.to(points.dtype).mT, points[:, piece])
    return total


def lloyd(
    points: Tensor,
    valid: Tensor,
    origin: Tensor | None,
    centroids: Tensor,
    alive: Tensor,
    form: Tensor | None,
    updates: int,
    signs: bool,
) -> Tensor:
    """Centroids (lead c w), relative to the origin, after ``updates`` rounds of assign and update. An empty cluster
    keeps its place."""
    centroids, points = centroids.clone(), centred(points.flatten(0, 1), origin, slice(None), slice(None))
    for _ in range(updates):
        labels = nearest(points.unsqueeze(0), *_scorer(centroids, alive, form, signs), None).masked_fill_(~valid, -1)
        totals = sums(points, labels, centroids.shape[1])
        counts = torch.zeros(*alive.shape, dtype=points.dtype, device=points.device)
        counts.scatter_add_(1, labels.clamp(min=0), valid.to(points.dtype))
        # signs: a majority, a drawn vote being 0 as a bit (-1 as a sign)
        means = (
            torch.where(totals > 0, 1.0, -1.0).to(totals.dtype) if signs else totals / counts.clamp(min=1).unsqueeze(-1)
        )
        centroids = torch.where((counts > 0).unsqueeze(-1), means, centroids)
    return centroids


def rows_at(points: Tensor, at: Tensor) -> Tensor:
    """points (b h n w), at (b h s) -> (b h s w); -1 takes any row."""
    return points.gather(2, at.clamp(min=0).unsqueeze(-1).expand(*at.shape, points.shape[-1]))


def kmeans(
    points: Tensor,
    valid: Tensor | None,
    start_at: Tensor,
    train_at: Tensor | None,
    form: Tensor | None,
    updates: int,
    signs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Right side, offset and origin of the centres (see Centres), from the points at start_at."""
    alive, centroids = (start_at >= 0).flatten(0, 1), wide(rows_at(points, start_at)).flatten(0, 1)
    origin = torch.zeros_like(centroids[:, :1])
    if not signs:
        living = alive[:, :FEW].unsqueeze(-1)
        origin = (centroids[:, :FEW] * living).sum(1, keepdim=True) / living.sum(1, keepdim=True).clamp(min=1)
        centroids = centroids - origin
    if updates:
        if train_at is not None:
            points, valid = rows_at(points, train_at), (train_at >= 0).flatten(0, 1)
        elif valid is None:
            valid = points.new_ones((centroids.shape[0], points.shape[2]), dtype=torch.bool)
        centroids = lloyd(points, valid, origin, centroids, alive, form, updates, signs)
    return *_scorer(centroids, alive, form, signs), origin


def means(
    x: Tensor, member_of: Tensor, order: Tensor | None, first: Tensor | None, clusters: int
) -> tuple[Tensor, Tensor]:
    """The members' means and numbers; the reference does not need them sorted (order, first)."""
    b, h, n, d = x.shape
    total = sums(wide(x).reshape(b * h, n, d), member_of.reshape(b * h, n), clusters).view(b, h, clusters, d)
    bins = torch.where(member_of < 0, clusters, member_of)
    counts = torch.zeros(b, h, clusters + 1, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add_(2, bins, torch.ones_like(bins))[..., :clusters].contiguous()
    return (total / counts.clamp(min=1).unsqueeze(-1)).to(x.dtype), counts


def means_backward(d_means: Tensor, member_of: Tensor, counts: Tensor) -> Tensor:
    """Each member's share of its mean's gradient."""
    return broadcast((wide(d_means) / counts.clamp(min=1).unsqueeze(-1)).to(d_means.dtype), member_of)


def covariance(k: Tensor, keep: Tensor | None, at: Tensor | None) -> Tensor:
    """Cov(K) over the real keys: k (b hk m d), keep (b m) or at (b hk s) -> (b hk d d)."""
    keys = wide(k if at is None else rows_at(k, at))
    if keep is None and at is None:
        centred, total = keys - keys.mean(2, keepdim=True), keys.new_full((1, 1, 1, 1), float(k.shape[2]))
    else:
        real = (keep[:, None] if at is None else at >= 0).unsqueeze(-1)  # type: ignore[index]
        total = real.sum(2, keepdim=True).clamp(min=1)
        centred = (keys - (keys * real).sum(2, keepdim=True) / total) * real
    return centred.mT @ centred / total


def growth(clusters: int) -> list[int]:
    """How many starts there are before each round: none, one, and then half as many more each time."""
    sizes = [0]
    while (size := sizes[-1] + max(1, sizes[-1] // 2)) < clusters:
        sizes.append(size)
    return sizes


def farthest(points: Tensor, pool_at: Tensor, clusters: int, form: Tensor | None, signs: bool) -> Tensor:
    """Of the points (b h n w) at pool_at (b h p), the positions (lead c) of those that lie far apart. -1 where no cell
    has more to offer: the pool is nearly used up.

    First comes the point farthest from the mean. Then, in rounds, the points are cut into cells, each around the chosen
    point that is nearest; the half of the cells that reach farthest choose their farthest point. As good as choosing
    one point after another, in log(c) rounds instead of c.
    """
    points, valid = rows_at(points, pool_at).flatten(0, 1), (pool_at >= 0).flatten(0, 1)
    lead, n, w = points.shape
    held = wide(points).masked_fill(~valid.unsqueeze(-1), 0.0)
    total = held[:, :FEW].sum(1, keepdim=True)
    if not signs:  # codes are all of one length, and in whole numbers ties stay ties
        held = held - total / valid[:, :FEW].sum(1).clamp(min=1).view(-1, 1, 1)
    seen = held if form is None else torch.bmm(held, form)
    norms = (held * seen).sum(-1)
    gap = w * FEW - (held * total).sum(-1) if signs else norms  # whoever is farthest, no gap is negative
    gap = gap.masked_fill(~valid, NEVER)
    cell = torch.zeros(lead, n, dtype=torch.int64, device=points.device)
    place = n - torch.arange(n, device=points.device)
    chosen = torch.full((lead, clusters), -1, dtype=torch.int64, device=points.device)
    sizes = growth(clusters)
    for size, grown in zip(sizes, [*sizes[1:], clusters], strict=True):
        # an offer is a gap and, should two be equal, a place: the first comes first
        offers = (gap.clamp(min=0).float().view(torch.int32).long() << 32) + place
        offers = offers.masked_fill_(gap == NEVER, 0)
        best = torch.zeros(lead, max(size, 1), dtype=torch.int64, device=points.device)
        best = best.scatter_reduce_(1, cell, offers, "amax").topk(grown - size).values
        picked = torch.where(best == 0, -1, n - (best & 0xFFFFFFFF))
        chosen[:, size:grown] = picked
        if size == 0:
            gap = torch.where(valid, float("inf"), NEVER).to(norms.dtype)
        for few in spans(grown - size, budget(points) // max(lead * n, 1)):
            at = picked[:, few].clamp(min=0)
            theirs = held.gather(1, at.unsqueeze(-1).expand(*at.shape, w))
            apart = torch.baddbmm(norms.unsqueeze(1), theirs, seen.mT, alpha=-2).add_(norms.gather(1, at).unsqueeze(-1))
            apart = apart.clamp_(min=0).masked_fill_(picked[:, few, None] < 0, float("inf"))
            near = apart.amin(1)
            cell = torch.where(near < gap, size + few.start + _highest(apart.neg_()), cell)
            gap = torch.minimum(gap, near)
        taken = torch.zeros(lead, n + 1, dtype=torch.bool, device=points.device)
        gap = gap.masked_fill(taken.scatter_(1, torch.where(picked < 0, n, picked), True)[:, :n], NEVER)
    return torch.where(chosen < 0, -1, pool_at.flatten(0, 1).gather(1, chosen.clamp(min=0)))
