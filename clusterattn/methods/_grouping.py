"""Queries into clusters: draw, start, refine, assign. Shared by the clustered family, for whole sequences or blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._types import Call
from ..ops import draw
from ..ops._chunks import wide
from ..ops.kmeans import Centres

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
    view: Tensor | None = None  # (... d r) for keys along a few directions, instead of the form

    @property
    def signs(self) -> bool:
        return self.metric == "hamming"

    def points(self, x: Tensor, call: Call) -> Tensor:
        if self.view is not None:
            return (wide(x) @ self.view).to(x.dtype)
        return x if self.planes is None else call.ops.codes(x, self.planes, self.thresholds)


def space(
    metric: str, d: int, bits: int, bias: bool, form: Tensor | None, rank: int | None, call: Call, device: torch.device
) -> Space:  # fmt: skip
    if metric == "keys" and form is not None and rank is not None and rank < d:
        return Space(metric, None, None, None, main_directions(form, rank, call.seed))
    if metric != "hamming":
        return Space(metric, None, None, form if metric == "keys" else None)
    drawn = draw.normal((bits, d + 1), call.seed, draw.STREAM_PLANES, device)
    return Space(metric, drawn[:, :d].mT, drawn[:, d] if bias else None, None)


def main_directions(form: Tensor, rank: int, seed: draw.Seed) -> Tensor:
    """B (... d r) with B Bᵀ close to the form (... d d): the distance of x and y in the form's metric, along its main
    directions alone, is |xB - yB|. Drawn vectors, turned twice towards those directions, span the space; B is
    Nyström's in it."""
    size = form.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    held = form / torch.where(size > 0, size, 1.0)  # powers of it neither grow nor vanish
    drawn = draw.normal((rank, form.shape[-1]), seed, draw.STREAM_DIRECTIONS, form.device).mT.to(form.dtype)
    span = held @ (held @ drawn)
    seen = held @ span
    inner = span.mT @ seen  # (... r r)
    floor = inner.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * 1e-6 + torch.finfo(form.dtype).tiny
    root, _ = torch.linalg.cholesky_ex(inner + floor * torch.eye(rank, dtype=form.dtype, device=form.device))
    found: Tensor = torch.linalg.solve_triangular(root, seen.mT, upper=False).mT * size.sqrt()
    return found


def centres(
    points: Tensor, valid: Tensor | None, clusters: int, steps: int, start: str, sample: int | None, where: Space,
    call: Call,
) -> Centres:  # fmt: skip
    """k-means over the points (... n w), valid (... n) or None: all. ``steps`` counts assignments: the last one, of
    everybody, is left to ``nearest``."""
    n = points.shape[-2]
    pool = min(clusters if start == "random" else FAR_POOL * clusters, n)
    chosen = draw.positions(valid, points, n, call.seed, draw.STREAM_STARTS, pool)
    if start == "far":
        chosen = call.ops.farthest(points, chosen, min(clusters, n), signs=where.signs, form=where.form)
    drawn = None
    if steps > 1 and sample is not None and sample < n:
        drawn = draw.positions(valid, points, n, call.seed, draw.STREAM_SAMPLE, sample)
    found: Centres = call.ops.kmeans(
        points, valid, chosen, train_at=drawn, updates=steps - 1, signs=where.signs, form=where.form
    )
    return found


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
    total = running(real[:, :, :first].sum(2), real[:, :, first:padded].reshape(b, 1, blocks - 1, step).sum(3)).clamp(
        min=1
    )
    mean = mean / total.unsqueeze(-1)
    cov = second / total[..., None, None] - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    return cov.repeat_interleave(heads // hk, 1)


def ranks(valid: Tensor) -> Tensor:
    """The rank of every valid row among the valid ones (... n), -1 elsewhere."""
    return torch.where(valid, valid.cumsum(-1) - 1, -1)
