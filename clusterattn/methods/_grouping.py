"""Queries into clusters: draw, start, refine, assign. Shared by the clustered family, over whole sequences or blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _draw
from .._types import Call
from ..ops._chunks import wide

METRICS = ("hamming", "euclid", "keys")
STARTS = ("random", "far")
FAR_POOL = 8  # farthest-first picks from this many random queries per cluster


@dataclass(frozen=True)
class Space:
    """Queries as points of one metric: what k-means sees."""

    metric: str
    planes: Tensor | None  # (d w) for hamming
    thresholds: Tensor | None  # (w), the old code's hash bias
    form: Tensor | None  # (... d d) for keys: Cov(K)

    @property
    def signs(self) -> bool:
        return self.metric == "hamming"

    def points(self, x: Tensor) -> Tensor:
        if self.planes is None:
            return wide(x)
        projected = wide(x) @ self.planes.to(wide(x).dtype)
        if self.thresholds is not None:
            projected = projected - self.thresholds.to(projected.dtype)
        return torch.where(projected > 0, 1.0, -1.0).to(projected.dtype)


def space(metric: str, d: int, bits: int, bias: bool, form: Tensor | None, call: Call, device: torch.device) -> Space:
    if metric != "hamming":
        return Space(metric, None, None, form if metric == "keys" else None)
    drawn = _draw.normal((bits, d + 1), call.seed, _draw.STREAM_PLANES, device)
    return Space(metric, drawn[:, :d].mT, drawn[:, d] if bias else None, None)


@dataclass(frozen=True)
class Centres:
    """The result of k-means: enough to assign anybody."""

    centroids: Tensor  # (... c w)
    alive: Tensor  # (... c)
    origin: Tensor | None  # (... 1 w), subtracted from points: a shared offset costs digits, not meaning
    space: Space

    def assign(self, x: Tensor, call: Call) -> Tensor:
        points = self.space.points(x)
        if self.origin is not None:
            points = points - self.origin
        return call.ops.assign(points, self.centroids, self.alive, self.space.form, signs=self.space.signs)


def centres(
    x: Tensor, valid: Tensor, clusters: int, steps: int, start: str, sample: int | None, where: Space, call: Call
) -> Centres:
    """k-means over the valid rows of x (... n d), valid (... n). ``steps`` counts assignments: the last one, of
    everybody, is left to Centres.assign."""
    n = x.shape[-2]
    pool = clusters if start == "random" else FAR_POOL * clusters
    drawn = max(pool, sample or 0) if steps > 1 else pool
    lots = _draw.lottery(valid, call.seed, _draw.STREAM_STARTS, min(drawn, n))  # (... drawn), shared by heads
    points = where.points(x)

    def pick(at: Tensor) -> Tensor:
        lead, w = points.shape[:-2], points.shape[-1]
        return points.gather(-2, at.clamp(min=0).expand(*lead, -1).unsqueeze(-1).expand(*lead, -1, w))

    chosen = lots[..., : min(clusters, n)]
    if start == "far":
        candidates = lots[..., : min(pool, n)]
        best = call.ops.farthest(pick(candidates), candidates >= 0, chosen.shape[-1], where.form)
        chosen = torch.where(best >= 0, candidates.expand(*best.shape[:-1], -1).gather(-1, best.clamp(min=0)), -1)
    alive = chosen >= 0
    centroids = pick(chosen)
    origin = None
    if not where.signs:
        living = alive.unsqueeze(-1)
        origin = (centroids * living).sum(-2, keepdim=True) / living.sum(-2, keepdim=True).clamp(min=1)
        centroids = centroids - origin
    if steps > 1:
        train, known = points, valid
        if sample is not None and sample < n:
            train, known = pick(lots[..., :sample]), lots[..., :sample] >= 0
        if origin is not None:
            train = train - origin
        centroids = call.ops.lloyd(train, known, centroids, alive, where.form, updates=steps - 1, signs=where.signs)
    return Centres(centroids, alive, origin, where)


def covariance(k: Tensor, valid: Tensor, heads: int) -> Tensor:
    """Cov(K) over the valid keys, for each query head: k (b hk m d), valid (b m) -> (b h d d)."""
    keys, real = wide(k), valid[:, None, :, None]
    total = real.sum(2, keepdim=True).clamp(min=1)
    centred = (keys - (keys * real).sum(2, keepdim=True) / total) * real
    return (centred.mT @ centred / total).repeat_interleave(heads // k.shape[1], 1)


def prefix_covariances(k: Tensor, valid: Tensor, heads: int, first: int, step: int, blocks: int) -> Tensor:
    """Cov of the keys before each block: the first ``first + j * step`` ones, (b h blocks d d). Sums run forward only,
    so that a later key cannot touch an earlier block even in the last bit."""
    b, hk, m, d = k.shape
    keys = wide(k) * valid[:, None, :, None]
    padded = first + (blocks - 1) * step
    head, tail = keys[:, :, :first], keys[:, :, first:padded].reshape(b, hk, blocks - 1, step, d)

    def running(of_head: Tensor, of_tail: Tensor) -> Tensor:
        return torch.cat([of_head.unsqueeze(2), of_tail], 2).cumsum(2)

    second = running(head.mT @ head, tail.mT @ tail)
    mean = running(head.sum(2), tail.sum(3))
    real = valid[:, None].to(keys.dtype)
    total = running(real[:, :, :first].sum(2), real[:, :, first:padded].reshape(b, 1, blocks - 1, step).sum(3)).clamp(min=1)
    mean = mean / total.unsqueeze(-1)
    cov = second / total[..., None, None] - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    return cov.repeat_interleave(heads // hk, 1)


def ranks(valid: Tensor) -> Tensor:
    """The rank of every valid row among the valid ones (... n), -1 elsewhere."""
    return torch.where(valid, valid.cumsum(-1) - 1, -1)
