"""Queries into clusters: draw, start, refine, assign. Shared by the clustered family, for whole sequences or blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .._types import Call, Clusters, Parts
from ..ops import draw
from ..ops._chunks import wide
from ..ops.beside import EVERY, View
from ..ops.kmeans import Centres

METRICS = ("hamming", "euclid", "keys")
STARTS = ("random", "far")
FAR_POOL = 8  # farthest-first picks from this many random queries per cluster
DIRECTIONS = 32  # keys are compared by their products with so many differences of queries from their centroids
FROM_STARTS = 64  # clusters: from so many on, differences from where these start say the same of the keys
MOST_STARTS = 128  # among which the nearest is sought
SPREAD_SAMPLE = 256  # keys that tell how far keys and values spread


class Sizes(Protocol):
    """What grouping the keys reads of a method."""

    @property
    def clusters(self) -> int: ...
    @property
    def metric(self) -> str: ...
    @property
    def parts(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def sample(self) -> int | None: ...
    @property
    def start(self) -> str: ...


@dataclass(frozen=True)
class Space:
    """Queries as points of one metric: what k-means sees."""

    metric: str
    planes: Tensor | None  # (d w) for hamming
    thresholds: Tensor | None  # (w), the old code's hash bias
    form: Tensor | None  # (... d d) for keys: Cov(K)
    view: Tensor | None = None  # (... d r) for keys along a few directions, instead of the form
    centre: Tensor | None = None  # (... 1 d) taken off first: in half precision an offset of all would drown the rest

    @property
    def signs(self) -> bool:
        return self.metric == "hamming"

    def points(self, x: Tensor, call: Call) -> Tensor:
        if self.view is not None:
            # The centre is taken off before the product is rounded.
            view, rows = self.view.to(x.dtype), x.flatten(0, -3)
            offset = -(self.centre.to(x.dtype) @ view) if self.centre is not None else x.new_zeros(())
            seen = torch.baddbmm(offset.expand(*x.shape[:-2], 1, view.shape[-1]).flatten(0, -3), rows,
                                 view.expand(*x.shape[:-2], *view.shape[-2:]).flatten(0, -3))  # fmt: skip
            return seen.view(*x.shape[:-1], view.shape[-1])
        return x if self.planes is None else call.ops.codes(x, self.planes, self.thresholds)


def first_row(x: Tensor, valid: Tensor | None) -> Tensor:
    """The first valid row of x (... n d), (... 1 d): as good a centre as the mean to take an offset off, and the same
    bits whatever the padding."""
    if valid is None:
        return wide(x[..., :1, :])
    at = valid.to(torch.uint8).argmax(-1, keepdim=True).expand(*x.shape[:-2], 1).unsqueeze(-1)
    return wide(x.gather(-2, at.expand(*at.shape[:-1], x.shape[-1])))


def space(
    metric: str, d: int, bits: int, bias: bool, form: Tensor | None, rank: int | None, centre: Tensor | None,
    call: Call, device: torch.device,
) -> Space:  # fmt: skip
    if metric == "keys" and form is not None and rank is not None and rank < d:
        return Space(metric, None, None, None, main_directions(form, rank, call.seed), centre)
    if metric != "hamming":
        return Space(metric, None, None, form if metric == "keys" else None)
    drawn = draw.normal((bits, d + 1), call.seed, draw.STREAM_PLANES, device)
    return Space(metric, drawn[:, :d].mT, drawn[:, d] if bias else None, None)


def main_directions(form: Tensor, rank: int, seed: draw.Seed) -> Tensor:
    """B (... d r) with B Bᵀ close to the form (... d d): the distance of x and y in the form's metric, along its main
    directions alone, is |xB - yB|. Drawn vectors, turned twice towards those directions, span the space; B is
    Nyström's in it. In fp64: ``inner`` holds fifth powers of the form's spectrum, which spans ten digits in real heads.
    """
    size = form.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    held = (form / torch.where(size > 0, size, 1.0)).double()  # powers of it neither grow nor vanish
    drawn = draw.normal((rank, form.shape[-1]), seed, draw.STREAM_DIRECTIONS, form.device).mT.double()
    span = held @ (held @ drawn)
    seen = held @ span
    inner = span.mT @ seen  # (... r r)
    floor = inner.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * 1e-12 + torch.finfo(inner.dtype).tiny
    root, _ = torch.linalg.cholesky_ex(inner + floor * torch.eye(rank, dtype=inner.dtype, device=form.device))
    found: Tensor = torch.linalg.solve_triangular(root, seen.mT, upper=False).mT * size.sqrt()
    return found.to(form.dtype)


def directions_cost(d: int, rank: int) -> int:
    return 3 * d * d * rank + 2 * d * rank * rank


QUERIES, KEYS = (draw.STREAM_STARTS, draw.STREAM_SAMPLE), (draw.STREAM_PART_STARTS, draw.STREAM_PART_SAMPLE)


def centres(
    points: Tensor, valid: Tensor | None, clusters: int, steps: int, start: str, sample: int | None, where: Space,
    call: Call,
) -> Centres:  # fmt: skip
    """k-means over the points (... n w), valid (... n) or None: all. ``steps`` counts assignments: the last one, of
    everybody, is left to ``nearest``."""
    n = points.shape[-2]
    pool, drawn = lots(valid, points, n, clusters, steps, start, sample, call, QUERIES)
    return trained(points, valid, pool, drawn, min(clusters, n), steps, start, where, call)


def lots(
    valid: Tensor | None, like: Tensor, n: int, clusters: int, steps: int, start: str, sample: int | None, call: Call,
    streams: tuple[int, int],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Of n tokens, the positions of those that k-means may start from, and of those that it trains on; None: on all, or
    on none, where there is nothing to train."""
    most = min(clusters if start == "random" else FAR_POOL * clusters, n)
    pool = draw.positions(valid, like, n, call.seed, streams[0], most)
    if steps == 1 or sample is None or sample >= n:
        return pool, None
    return pool, draw.positions(valid, like, n, call.seed, streams[1], sample)


def trained(
    points: Tensor, valid: Tensor | None, pool: Tensor, drawn: Tensor | None, clusters: int, steps: int, start: str,
    where: Space, call: Call,
) -> Centres:  # fmt: skip
    """k-means from some of the points in the pool, over those drawn."""
    if start == "far":
        pool = call.ops.farthest(points, pool, clusters, signs=where.signs, form=where.form)
    found: Centres = call.ops.kmeans(
        points, valid, pool, train_at=drawn, updates=steps - 1, signs=where.signs, form=where.form
    )
    return found


def from_starts(sizes: Sizes) -> bool:
    """Are keys seen by differences of queries from where k-means of the clusters starts, the nearest such place, and
    not from where it ends? Then parts need not wait for the clusters. (Of 16 clusters the error would grow by 5 %, of
    64 and more by less than one.) The rule asks no length: padding changes nothing."""
    return sizes.metric == "keys" and sizes.start == "random" and sizes.clusters >= FROM_STARTS


def parts(q: Tensor, k: Tensor, v: Tensor, clusters: Clusters | None, sizes: Sizes, call: Call) -> Parts:
    """The keys (b hk m d) beside their values, by k-means: alike are keys whose products with the queries' differences
    from their centroids are alike, and values that are. Either side is scaled to a spread of one. Without clusters
    differences are those ``from_starts``."""
    (b, hk, m, _), count = k.shape, sizes.parts
    real = None if call.mask.keys is None else call.mask.keys.unsqueeze(1)
    if count >= m:
        each = ranks(call.mask.key_rows(q).unsqueeze(1)).expand(b, hk, m)
        return Parts(each, count, call.ops.members(each, count, k, parts=True))
    seen = _seen_by(q, k, v, clusters, sizes, real, call)
    pool, drawn = lots(real, k, m, count, sizes.steps, sizes.start, sizes.sample, call, KEYS)
    where = Space("euclid", None, None, None)
    if sizes.steps > 1 and drawn is None:  # on all keys, whose points are there then
        points, _, _ = call.ops.beside(k, v, seen)
        found = trained(points, real, pool, None, count, sizes.steps, sizes.start, where, call)
        labels = call.ops.nearest(points, found)
    else:
        points, pool, drawn = call.ops.beside(k, v, seen, pool, drawn)
        found = trained(points, None, pool, drawn, count, sizes.steps, sizes.start, where, call)
        labels = call.ops.nearest_beside(k, v, seen, found)
    if real is not None:
        labels = torch.where(real, labels, -1)
        labels = torch.where(real.sum(-1, keepdim=True) <= count, ranks(real), labels)
    return Parts(labels, count, call.ops.members(labels, count, k, parts=True))


def _seen_by(
    q: Tensor, k: Tensor, v: Tensor, clusters: Clusters | None, sizes: Sizes, real: Tensor | None, call: Call
) -> View:
    (h, n), (hk, m) = q.shape[1:3], k.shape[1:3]
    asked = None if call.mask.queries is None else call.mask.queries.unsqueeze(1)

    def queries(stream: int, most: int) -> Tensor:
        return draw.positions(asked, q, n, call.seed, stream, min(most, n))

    queries_at = queries(draw.STREAM_RESIDUALS, max(DIRECTIONS * hk // h, 1))
    keys_at = draw.positions(real, k, m, call.seed, draw.STREAM_KEYS, min(SPREAD_SAMPLE, m))
    if clusters is None:
        starts_at = queries(draw.STREAM_STARTS, min(sizes.clusters, MOST_STARTS))
        return call.ops.view(q, k, v, queries_at, keys_at, starts_at=starts_at)  # type: ignore[no-any-return]
    means, labels = clusters.means.detach(), clusters.labels
    return call.ops.view(q, k, v, queries_at, keys_at, means=means, labels=labels)  # type: ignore[no-any-return]


def parts_cost(n: int, m: int, d: int, e: int, sizes: Sizes, group: int) -> int:
    """Multiply-adds of ``parts`` for one query head, of which ``group`` share the keys."""
    count, steps, train = sizes.parts, sizes.steps, min(sizes.sample or max(n, m), m)
    width, spread = DIRECTIONS + e, min(SPREAD_SAMPLE, m)
    far = sizes.start == "far"
    pool = min(FAR_POOL * count if far else count, m)
    apart = 0 if steps > 1 and train == m else pool + (train if steps > 1 else 0)
    seen = (m + spread + apart) * d * DIRECTIONS
    if from_starts(sizes):
        starts = min(sizes.clusters, MOST_STARTS, n)
        seen += -(-spread // EVERY) * ((DIRECTIONS + group * starts) * d + DIRECTIONS * starts)
    kmeans = (steps - 1) * train * (count + 1) * width + (pool if far else 0) * count * width + m * count * width
    return (seen + kmeans) // group


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
