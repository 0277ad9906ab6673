"""Who is alike, over all ranks: the same starts, steps and draws as on one device (methods/_grouping.py).

k-means starts from gathered tokens; in every step each rank assigns its own share of the sample (or of everybody) and
the sums of the clusters are added up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .._types import Call, Clusters, Parts
from ..methods import _grouping
from ..methods.clustered import Clustered
from ..methods.improved import Improved
from ..ops import draw
from ..ops._chunks import wide
from ..ops.kmeans import Centres
from ..ops.kmeans.reference import sums
from ._share import Share, lots, rows_at


def clusters(method: Clustered, q: Tensor, k: Tensor, queries: Share, keys: Share, call: Call) -> Clusters:
    """Of the queries, with all sizes filled in. Labels are those of this rank's queries; counts and means are of all,
    the means with gradient."""
    count = min(method.clusters, queries.length)
    labels = queries.numbered().expand(q.shape[:3])
    if method.clusters < queries.length:
        where = _space(method, q.detach(), k.detach(), queries, keys, call)
        points = where.points(q.detach(), call)

        def points_at(at: Tensor | None) -> Tensor:
            return points if at is None else rows_at(points, at)

        pool_at, real = _pool(queries, count, method.start, call, _grouping.QUERIES[0])
        pool = where.points(queries.gather(q, pool_at, "k-means, starts"), call)
        found = _centres(
            points_at,
            pool,
            real,
            queries,
            count,
            method.steps,
            method.start,
            method.sample,
            where,
            call,
            _grouping.QUERIES[1],
        )
        labels = _own_if_few(call.ops.nearest(points, found), labels, queries, count)
    members = call.ops.members(labels, count, q)
    mean, held = call.ops.means(wide(q), labels, count, members=members)
    held = held.unsqueeze(-1).to(mean.dtype)
    total = queries.ranks.sum(torch.cat([mean * held, held], -1), "means of the clusters")
    counts = total[..., -1].detach().long()
    means = (total[..., :-1] / counts.clamp(min=1).unsqueeze(-1)).to(q.dtype)
    return Clusters(labels, counts, means, labels, members)


def parts(
    method: Improved, q: Tensor, k: Tensor, v: Tensor, found: Clusters, queries: Share, keys: Share, call: Call
) -> Parts:
    """Of the keys beside their values; q, k and v without gradient."""
    count, (h, hk) = method.parts, (q.shape[1], k.shape[1])
    labels = keys.numbered().expand(k.shape[:3])
    if count < keys.length:
        ways = min(max(_grouping.DIRECTIONS * hk // h, 1), queries.length)
        spread = min(_grouping.SPREAD_SAMPLE, keys.length)
        asked_at, asked = queries.draw(call.seed, draw.STREAM_RESIDUALS, ways)
        spread_at, spreading = keys.draw(call.seed, draw.STREAM_KEYS, spread)
        pool_at, real = _pool(keys, count, method.start, call, _grouping.KEYS[0])
        at, d = torch.cat([spread_at, pool_at], -1), k.shape[3]
        both = keys.gather(torch.cat([k, v], -1), at, "parts, starts and spread")
        gathered_k, gathered_v = both[..., :d], both[..., d:]
        if _grouping.from_starts(method):
            most = min(method.clusters, _grouping.MOST_STARTS, queries.length)
            starts_at, started = queries.draw(call.seed, draw.STREAM_STARTS, most)
            asking = queries.gather(q, torch.cat([asked_at, starts_at], -1), "parts, queries")
            starts = torch.where(lots(started, h) < 0, -1, lots(started, h) + ways)
            of: dict[str, Tensor] = {"starts_at": starts}
        else:
            asking = queries.gather(q, asked_at, "parts, queries")
            theirs = queries.ranks.reduce(rows_at(found.labels.unsqueeze(-1), asked_at), "parts, queries").squeeze(-1)
            of = {"means": found.means.detach(), "labels": theirs}
        seen = call.ops.view(asking, gathered_k, gathered_v, lots(asked, h), lots(spreading, hk), **of)

        def points_at(at: Tensor | None) -> Tensor:
            points: Tensor = call.ops.beside(*(x if at is None else rows_at(x, at) for x in (k, v)), seen)[0]
            return points

        pool = call.ops.beside(gathered_k[:, :, spread:], gathered_v[:, :, spread:], seen)[0]
        where, sample = _grouping.Space("euclid", None, None, None), method.sample
        centres = _centres(
            points_at, pool, real, keys, count, method.steps, method.start, sample, where, call, _grouping.KEYS[1]
        )
        labels = _own_if_few(call.ops.nearest_beside(k, v, seen, centres), labels, keys, count)
    return Parts(labels, count, call.ops.members(labels, count, k, parts=True))


def _own_if_few(labels: Tensor, numbered: Tensor, share: Share, count: int) -> Tensor:
    """No more real tokens than clusters: each is its own cluster. Padding has none."""
    few = torch.tensor([total <= count for total in share.totals], device=labels.device).view(-1, 1, 1)
    return torch.where(few, numbered, torch.where(share.valid.unsqueeze(1), labels, -1))


def _space(method: Clustered, q: Tensor, k: Tensor, queries: Share, keys: Share, call: Call) -> _grouping.Space:
    d, centre, form = q.shape[-1], None, None
    if method.metric == "keys":
        form = _covariance(k, keys, method.sample, call).repeat_interleave(q.shape[1] // k.shape[1], 1)
        if method.width(d) < d:
            first = torch.zeros(q.shape[0], 1, dtype=torch.int64, device=q.device)
            centre = wide(queries.gather(q, queries.held_at(first), "k-means, centre"))
    return _grouping.space(method.metric, d, method.bits, method.bias, form, method.rank, centre, call, q.device)


def _covariance(k: Tensor, keys: Share, sample: int | None, call: Call) -> Tensor:
    """Cov(K) over a sample of the keys of all ranks, or over all: (b hk d d)."""
    if sample is not None and sample < keys.length:
        at, _ = keys.draw(call.seed, draw.STREAM_KEYS, sample)
        held, real = wide(rows_at(k, at)), (at >= 0)[:, None, :, None]
    else:
        held, real = wide(k), keys.valid[:, None, :, None]
    first = torch.cat([(held * real).sum(2), real.sum(2).to(held.dtype).expand(-1, k.shape[1], -1)], -1)
    first = keys.ranks.reduce(first, "the keys' metric")
    total = first[..., -1:].clamp(min=1).unsqueeze(-1)
    centred = (held - first[..., None, :-1] / total) * real
    return keys.ranks.reduce(centred.mT @ centred, "the keys' metric") / total


def _pool(share: Share, count: int, start: str, call: Call, stream: int) -> tuple[Tensor, Tensor]:
    """The tokens that k-means may start from."""
    most = min(count if start == "random" else _grouping.FAR_POOL * count, share.length)
    return share.draw(call.seed, stream, most)


def _centres(
    points_at: Callable[[Tensor | None], Tensor],
    pool: Tensor,
    real: Tensor,
    share: Share,
    count: int,
    steps: int,
    start: str,
    sample: int | None,
    where: _grouping.Space,
    call: Call,
    stream: int,
) -> Centres:
    """k-means over the points of all ranks, from starts in the gathered pool (b h s w), real (b s). points_at: those of
    this rank's tokens at positions (b s), or of all (None). The last of the ``steps``, of everybody, is left out."""
    heads = pool.shape[1]
    chosen = lots(real, heads)
    if start == "far":
        chosen = call.ops.farthest(pool, chosen, min(count, share.length), signs=where.signs, form=where.form)
    found: Centres = call.ops.kmeans(pool, None, chosen, updates=0, signs=where.signs, form=where.form)
    if steps == 1:
        return found
    drawn, valid = None, share.valid
    if sample is not None and sample < share.length:
        drawn, _ = share.draw(call.seed, stream, sample)
        valid = drawn >= 0
    points = points_at(drawn)
    origin = 0.0 if found.origin is None else found.origin
    train, valid = wide(points) - origin, valid.unsqueeze(1)
    at = chosen.clamp(min=0).unsqueeze(-1).expand(*chosen.shape, pool.shape[-1])
    centroids, alive = wide(pool.gather(2, at)) - origin, chosen >= 0
    for _ in range(steps - 1):
        labels = torch.where(valid, call.ops.nearest(points, found), -1)
        ones = torch.ones_like(train[..., :1])
        total = sums(torch.cat([train, ones], -1).flatten(0, 1), labels.flatten(0, 1), centroids.shape[2])
        total = share.ranks.reduce(total, "k-means, sums").view(*centroids.shape[:3], -1)
        moved, counts = total[..., :-1], total[..., -1:]
        # signs: a majority, a drawn vote being 0 as a bit (-1 as a sign), and nothing behind the signs
        majority = torch.where(moved > 0, 1.0, -1.0).to(moved.dtype) * (centroids != 0)
        means = majority if where.signs else moved / counts.clamp(min=1)
        centroids = torch.where(counts > 0, means, centroids)
        found = _centred(centroids, alive, found, where)
    return found


def _centred(centroids: Tensor, alive: Tensor, like: Centres, where: _grouping.Space) -> Centres:
    """Centroids as ``nearest`` reads them; those that never were cannot win."""
    seen = centroids if where.form is None else centroids @ where.form.to(centroids.dtype)
    offset = torch.zeros_like(centroids[..., 0]) if where.signs else (centroids * seen).sum(-1) * -0.5
    offset = offset.masked_fill(~alive, float("-inf"))
    return replace(like, right=seen.to(like.right.dtype), offset=offset.to(like.offset.dtype))
