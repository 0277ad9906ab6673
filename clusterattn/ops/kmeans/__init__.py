"""kmeans: who is alike. codes, farthest starts, k-means from chosen starts, the nearest centroid of everybody, and the
members' means.

Torch.library ops, so that a compiled graph holds one node per call rather than steps x chunks of them. Only ``means``
has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from ..._types import Members
from .. import _backends
from .._backends import REFERENCE, serving
from .._chunks import wide
from .._op import op


@dataclass(frozen=True)
class Centres:
    """The result of k-means, enough to place anybody: ``(x - origin) . right + offset`` is largest at the nearest."""

    right: Tensor  # (... c w)
    offset: Tensor  # (... c), -inf for a cluster that never was
    origin: Tensor | None  # (... 1 w)
    signs: bool = False  # of points that are codes: products are whole numbers


@op("kmeans")
def _kmeans(
    points: Tensor, valid: Optional[Tensor], start_at: Tensor, train_at: Optional[Tensor], form: Optional[Tensor],
    updates: int, signs: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    run = _backends.function("kmeans", backend)
    found: tuple[Tensor, Tensor, Tensor] = run(points, valid, start_at, train_at, form, updates, signs)
    return found


@_kmeans.fake
def _(
    points: Tensor, valid: Optional[Tensor], start_at: Tensor, train_at: Optional[Tensor], form: Optional[Tensor],
    updates: int, signs: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    acc = torch.promote_types(points.dtype, torch.float32)
    (b, h, _, w), c = points.shape, start_at.shape[2]
    return (
        points.new_empty((b * h, c, w), dtype=points.dtype if _backends.keeps_dtype(backend) else acc),
        points.new_empty((b * h, c), dtype=acc),
        points.new_empty((b * h, 1, w), dtype=acc),
    )


@op("nearest")
def _nearest(
    points: Tensor, right: Tensor, offset: Tensor, origin: Optional[Tensor], signs: bool, backend: str
) -> Tensor:
    found: Tensor = _backends.function("nearest", backend)(points, right, offset, origin, signs)
    return found


@_nearest.fake
def _(points: Tensor, right: Tensor, offset: Tensor, origin: Optional[Tensor], signs: bool, backend: str) -> Tensor:
    return points.new_empty((right.shape[0], points.shape[2]), dtype=torch.int64)


@op("lloyd")
def _lloyd(points: Tensor, valid: Tensor, centroids: Tensor, alive: Tensor, updates: int, backend: str) -> Tensor:
    found: Tensor = _backends.function("lloyd", backend)(points, valid, None, centroids, alive, None, updates, False)
    return found


@_lloyd.fake
def _(points: Tensor, valid: Tensor, centroids: Tensor, *_: object) -> Tensor:
    return torch.empty_like(centroids, memory_format=torch.contiguous_format)


@op("farthest")
def _farthest(
    points: Tensor, pool_at: Tensor, clusters: int, form: Optional[Tensor], signs: bool, backend: str
) -> Tensor:
    found: Tensor = _backends.function("farthest", backend)(points, pool_at, clusters, form, signs)
    return found


@_farthest.fake
def _(points: Tensor, pool_at: Tensor, clusters: int, form: Optional[Tensor], signs: bool, backend: str) -> Tensor:
    return points.new_empty((points.shape[0] * points.shape[1], clusters), dtype=torch.int64)


@op("covariance")
def _covariance(k: Tensor, keep: Optional[Tensor], at: Optional[Tensor], backend: str) -> Tensor:
    found: Tensor = _backends.function("covariance", backend)(k, keep, at)
    return found


@_covariance.fake
def _(k: Tensor, keep: Optional[Tensor], at: Optional[Tensor], backend: str) -> Tensor:
    b, hk, _, d = k.shape
    return k.new_empty((b, hk, d, d), dtype=torch.promote_types(k.dtype, torch.float32))


@op("means")
def _means(
    x: Tensor, member_of: Tensor, order: Optional[Tensor], first: Optional[Tensor], clusters: int, backend: str
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _backends.function("means", backend)(x, member_of, order, first, clusters)
    return found


@_means.fake
def _(
    x: Tensor, member_of: Tensor, order: Optional[Tensor], first: Optional[Tensor], clusters: int, backend: str
) -> tuple[Tensor, Tensor]:
    b, h, _, d = x.shape
    return x.new_empty((b, h, clusters, d)), x.new_empty((b, h, clusters), dtype=torch.int64)


@op("means_backward")
def _means_backward(d_means: Tensor, member_of: Tensor, counts: Tensor, backend: str) -> Tensor:
    found: Tensor = _backends.backward("means", backend)(d_means, member_of, counts)
    return found


@_means_backward.fake
def _(d_means: Tensor, member_of: Tensor, counts: Tensor, backend: str) -> Tensor:
    return d_means.new_empty((*member_of.shape, d_means.shape[-1]))


def _keep_members(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[1], output[1])
    ctx.backend = inputs[5]
    ctx.mark_non_differentiable(output[1])


def _give_back_means(ctx: Any, d_means: Tensor | None, _: None) -> Tensor | None:
    return None if d_means is None else _means_backward(d_means, *ctx.saved_tensors, ctx.backend)


_means.gradient(_give_back_means, _keep_members)


@_kmeans.flops
def _(points: Any, valid: Any, start_at: Any, train_at: Any, form: Any, updates: int, *_: Any) -> int:
    (b, h, rows, w), c = points, start_at[2]
    rows = rows if train_at is None else train_at[2]
    return int(2 * b * h * (updates * rows * c * w + (0 if form is None else (updates + 1) * c * w * w)))


@_nearest.flops
def _(points: Any, right: Any, *_: Any) -> int:
    b, h, n, w = points
    return int(2 * b * h * n * right[1] * w)


@_lloyd.flops
def _(points: Any, valid: Any, centroids: Any, alive: Any, updates: int, backend: str) -> int:
    b, h, n, w = points
    return int(2 * b * h * updates * n * centroids[1] * w)


@_farthest.flops
def _(points: Any, pool_at: Any, clusters: int, form: Any, *_: Any) -> int:
    (b, h, pool), w = pool_at, points[3]
    return int(2 * b * h * pool * w * (clusters + (0 if form is None else w)))


@_covariance.flops
def _(k: Any, keep: Any, at: Any, backend: str) -> int:
    b, hk, m, d = k
    return int(2 * b * hk * (m if at is None else at[2]) * d * d)


def _flat(x: Tensor | None, lead: torch.Size, keep: int) -> Tensor | None:
    """Expand the leading dimensions to ``lead`` and fold them into one."""
    if x is None:
        return None
    if x.shape[: x.dim() - keep] != lead:
        x = x.expand(*lead, *x.shape[x.dim() - keep :])
    return x.flatten(0, len(lead) - 1)


def _four(points: Tensor) -> Tensor:
    """(b h n w), whatever stands between b and n."""
    return points if points.dim() == 4 else points.flatten(1, -3)


def _three(at: Tensor | None, lead: torch.Size) -> Tensor | None:
    """(b h c) without a copy where there is nothing between b and c but the heads."""
    if at is None:
        return None
    if at.shape[:-1] != lead:
        at = at.expand(*lead, at.shape[-1])
    return at if len(lead) == 2 else at.flatten(1, -2)


def padded(bits: int) -> int:
    """Codes by kernels fill whole 16-byte words: zeros follow, and change no product."""
    return (bits + 15) // 16 * 16


def dtype_of_codes(x: Tensor) -> torch.dtype:
    """Of codes by kernels: signs are exact in half precision, whose products run on tensor cores."""
    return torch.float16 if x.dtype == torch.float32 else x.dtype


@op("codes")
def _codes(x: Tensor, planes: Tensor, thresholds: Optional[Tensor], backend: str) -> Tensor:
    found: Tensor = _backends.function("codes", backend)(x, planes, thresholds)
    return found


@_codes.fake
def _(x: Tensor, planes: Tensor, thresholds: Optional[Tensor], backend: str) -> Tensor:
    return x.new_empty((*x.shape[:3], padded(planes.shape[1])), dtype=dtype_of_codes(x))


def codes(x: Tensor, planes: Tensor, thresholds: Tensor | None, *, backend: str = "reference") -> Tensor:
    """Which side of each plane (d w) a vector lies on, as signs +1/-1: (... n w).

    Kernels write rows of whole 16-byte words: some zeros follow the signs, and change no product. For fp32 they write
    fp16.
    """
    name = serving("codes", backend, x)
    if name != REFERENCE:
        packed: Tensor = _codes(_four(x), planes, thresholds, name)
        return packed.view(*x.shape[:-1], packed.shape[-1])
    projected = wide(x) @ planes.to(wide(x).dtype)
    if thresholds is not None:
        projected = projected - thresholds.to(projected.dtype)
    return projected.gt_(0).mul_(2).sub_(1).to(x.dtype)


def kmeans(
    points: Tensor, valid: Tensor | None, start_at: Tensor, *,
    updates: int, train_at: Tensor | None = None, signs: bool = False, form: Tensor | None = None,
    backend: str = "reference",
) -> Centres:  # fmt: skip
    """Centres after ``updates`` rounds over the points (... n w), from those at start_at (... c), -1 being none.

    It trains on the points at train_at (... s), or on all the valid ones (... n; None: all); form (... w w) makes the
    metric; signs: points are codes, the metric is Hamming's.
    """
    lead = points.shape[:-2]
    right, offset, origin = _kmeans(
        _four(points), _flat(valid, lead, 1), _three(start_at, lead), _three(train_at, lead), _flat(form, lead, 2),
        updates, signs, serving("kmeans", backend, points),
    )  # fmt: skip
    c, w = right.shape[1:]
    return Centres(right.view(*lead, c, w), offset.view(*lead, c), None if signs else origin.view(*lead, 1, w), signs)


def nearest(points: Tensor, centres: Centres, *, backend: str = "reference") -> Tensor:
    """The best of the centres for every point: (... n); ties go to the lowest index."""
    lead = points.shape[:-2]
    flat: Tensor = _nearest(
        _four(points), _flat(centres.right, lead, 2), _flat(centres.offset, lead, 1), _flat(centres.origin, lead, 2),
        centres.signs, serving("nearest", backend, points),
    )  # fmt: skip
    return flat.view(*lead, points.shape[-2])


def assign(points: Tensor, directions: Tensor, alive: Tensor, *, backend: str = "reference") -> Tensor:
    """The living direction (... c w) with the largest product with each point: (... n)."""
    offset = torch.where(alive, 0.0, float("-inf")).to(wide(points).dtype).expand(*directions.shape[:-1])
    return nearest(points, Centres(directions, offset, None), backend=backend)


def lloyd(
    points: Tensor, valid: Tensor, centroids: Tensor, alive: Tensor, *, updates: int, backend: str = "reference"
) -> Tensor:
    """Euclidean k-means from given centroids (... c w): where they stand after ``updates`` rounds."""
    lead = points.shape[:-2]
    flat: Tensor = _lloyd(
        _four(points), _flat(valid, lead, 1), _flat(centroids, lead, 2), _flat(alive, lead, 1), updates,
        serving("lloyd", backend, points),
    )  # fmt: skip
    return flat.view(*lead, *centroids.shape[-2:])


def farthest(
    points: Tensor, pool_at: Tensor, clusters: int, *,
    signs: bool = False, form: Tensor | None = None, backend: str = "reference",
) -> Tensor:  # fmt: skip
    """Of the points (... n w) at pool_at (... p), the positions (... c) of those that lie far apart in the metric; -1
    where the pool is nearly used up."""
    lead = points.shape[:-2]
    positions: Tensor = _farthest(
        _four(points), _three(pool_at, lead), clusters, _flat(form, lead, 2), signs,
        serving("farthest", REFERENCE if signs else backend, points),  # codes have many ties: torch picks among them
    )  # fmt: skip
    return positions.view(*lead, clusters)


def means(
    x: Tensor, member_of: Tensor, clusters: int, *, members: Members | None = None, backend: str = "reference"
) -> tuple[Tensor, Tensor]:
    """The mean of each cluster's members (b h c d), with gradient to x, and their number (b h c).

    member_of -1: nobody's. 0 for an empty cluster. In the dtype of x: whoever compares a query with its centroid must
    see the centroid that attended.
    """
    name = serving("means", backend, x, members)
    order, first = (members.order, members.first) if members is not None else (None, None)
    found: tuple[Tensor, Tensor] = _means(x, member_of, order, first, clusters, name)
    return found


def covariance(
    k: Tensor, keep: Tensor | None, heads: int, *, at: Tensor | None = None, backend: str = "reference"
) -> Tensor:
    """Cov(K) over the real keys, for each query head: k (b hk m d), keep (b m) -> (b h d d). No gradient.

    at (b hk s): over the keys at these positions alone (-1: none); keep is not asked then.
    """
    cov: Tensor = _covariance(k, keep, at, serving("covariance", backend, k))
    return cov if heads == k.shape[1] else cov.repeat_interleave(heads // k.shape[1], 1)
