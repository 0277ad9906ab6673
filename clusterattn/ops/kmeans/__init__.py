"""kmeans: who is alike. Torch.library ops without gradient, so that a compiled graph holds one node per call
rather than steps x chunks of them."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .._chunks import wide
from . import reference


@torch.library.custom_op("clusterattn::lloyd", mutates_args=())
def _lloyd(
    points: Tensor, valid: Tensor, origin: Optional[Tensor], centroids: Tensor, alive: Tensor, form: Optional[Tensor],
    updates: int, signs: bool,
) -> Tensor:  # fmt: skip
    return reference.lloyd(points, valid, origin, centroids, alive, form, updates, signs)


@_lloyd.register_fake
def _(points: Tensor, valid: Tensor, origin: Optional[Tensor], centroids: Tensor, *_: object) -> Tensor:
    return torch.empty_like(centroids, memory_format=torch.contiguous_format)


@torch.library.custom_op("clusterattn::assign", mutates_args=())
def _assign(
    points: Tensor, origin: Optional[Tensor], centroids: Tensor, alive: Tensor, form: Optional[Tensor], signs: bool
) -> Tensor:
    return reference.assign(points, origin, centroids, alive, form, signs)


@_assign.register_fake
def _(points: Tensor, *_: object) -> Tensor:
    return points.new_empty(points.shape[:2], dtype=torch.int64)


@torch.library.custom_op("clusterattn::farthest", mutates_args=())
def _farthest(points: Tensor, valid: Tensor, clusters: int, form: Optional[Tensor]) -> Tensor:
    return reference.farthest(points, valid, clusters, form)


@_farthest.register_fake
def _(points: Tensor, valid: Tensor, clusters: int, form: Optional[Tensor]) -> Tensor:
    return points.new_empty((points.shape[0], clusters), dtype=torch.int64)


def _flat(x: Tensor | None, lead: torch.Size, keep: int) -> Tensor | None:
    """Expand the leading dimensions to ``lead`` and fold them into one."""
    return None if x is None else x.expand(*lead, *x.shape[x.dim() - keep :]).reshape(-1, *x.shape[x.dim() - keep :])


def codes(x: Tensor, planes: Tensor, thresholds: Tensor | None) -> Tensor:
    """Which side of each plane (d w) a vector lies on, as signs +1/-1: (... n w)."""
    projected = wide(x) @ planes.to(wide(x).dtype)
    if thresholds is not None:
        projected = projected - thresholds.to(projected.dtype)
    return torch.where(projected > 0, 1.0, -1.0).to(x.dtype)


def lloyd(
    points: Tensor, valid: Tensor, centroids: Tensor, alive: Tensor, *,
    updates: int, signs: bool = False, origin: Tensor | None = None, form: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Centroids (... c w) after ``updates`` rounds over the valid points (... n w). ``alive`` (... c) may win points.

    origin (... 1 w) is taken off the points, and is what the centroids are relative to; form (... w w) makes the metric;
    signs: points are codes, the metric is Hamming's.
    """
    lead = points.shape[:-2]
    flat = _lloyd(
        _flat(points, lead, 2), _flat(valid, lead, 1), _flat(origin, lead, 2), _flat(centroids, lead, 2), _flat(alive, lead, 1),
        _flat(form, lead, 2), updates, signs,
    )  # fmt: skip
    return flat.view(*lead, *centroids.shape[-2:])


def assign(
    points: Tensor, centroids: Tensor, alive: Tensor, *, signs: bool = False, origin: Tensor | None = None, form: Tensor | None = None
) -> Tensor:
    """The best centroid of every point: (... n). With ``signs`` simply the largest product."""
    lead = points.shape[:-2]
    flat = _assign(
        _flat(points, lead, 2), _flat(origin, lead, 2), _flat(centroids, lead, 2), _flat(alive, lead, 1), _flat(form, lead, 2), signs
    )
    return flat.view(*lead, points.shape[-2])


def farthest(points: Tensor, valid: Tensor, clusters: int, form: Tensor | None) -> Tensor:
    """Positions (... c) of points far apart in the metric of ``form``, -1 once the valid ones are used up."""
    lead = points.shape[:-2]
    return _farthest(_flat(points, lead, 2), _flat(valid, lead, 1), clusters, _flat(form, lead, 2)).view(*lead, clusters)
