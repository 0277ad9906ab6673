"""kmeans: who is alike. codes, farthest starts, Lloyd's steps, the assignment of everybody, and the members' means.

Torch.library ops, so that a compiled graph holds one node per call rather than steps x chunks of them. Only ``means``
has a gradient.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .._chunks import wide
from .._jit import serve
from ..rows import take
from . import kernels, moments, reference


@torch.library.custom_op("clusterattn::lloyd", mutates_args=())
def _lloyd(
    points: Tensor, valid: Tensor, origin: Optional[Tensor], centroids: Tensor, alive: Tensor, form: Optional[Tensor],
    updates: int, signs: bool, triton: bool,
) -> Tensor:  # fmt: skip
    lloyd = kernels.lloyd if triton else reference.lloyd
    return lloyd(points, valid, origin, centroids, alive, form, updates, signs)


@_lloyd.register_fake
def _(points: Tensor, valid: Tensor, origin: Optional[Tensor], centroids: Tensor, *_: object) -> Tensor:
    return torch.empty_like(centroids, memory_format=torch.contiguous_format)


@torch.library.custom_op("clusterattn::assign", mutates_args=())
def _assign(
    points: Tensor,
    origin: Optional[Tensor],
    centroids: Tensor,
    alive: Tensor,
    form: Optional[Tensor],
    signs: bool,
    triton: bool,
) -> Tensor:
    assign = kernels.assign if triton else reference.assign
    return assign(points, origin, centroids, alive, form, signs)


@_assign.register_fake
def _(points: Tensor, origin: Optional[Tensor], centroids: Tensor, *_: object) -> Tensor:
    return points.new_empty((centroids.shape[0], points.shape[2]), dtype=torch.int64)


@torch.library.custom_op("clusterattn::farthest", mutates_args=())
def _farthest(points: Tensor, valid: Tensor, clusters: int, form: Optional[Tensor], signs: bool) -> Tensor:
    return reference.farthest(points, valid, clusters, form, signs)


@_farthest.register_fake
def _(points: Tensor, valid: Tensor, clusters: int, form: Optional[Tensor], signs: bool) -> Tensor:
    return points.new_empty((points.shape[0], clusters), dtype=torch.int64)


@torch.library.custom_op("clusterattn::covariance", mutates_args=())
def _covariance(k: Tensor, keep: Optional[Tensor], triton: bool) -> Tensor:
    return moments.covariance(k, keep) if triton else reference.covariance(k, keep)


@_covariance.register_fake
def _(k: Tensor, keep: Optional[Tensor], triton: bool) -> Tensor:
    b, hk, _, d = k.shape
    return k.new_empty((b, hk, d, d), dtype=torch.promote_types(k.dtype, torch.float32))


@torch.library.custom_op("clusterattn::sums", mutates_args=())
def _sums(x: Tensor, members: Tensor, clusters: int, triton: bool) -> Tensor:
    b, h, n, d = x.shape
    if triton:
        total = kernels.sums(x, None, members.reshape(b * h, n), clusters)[0].sum(1)
    else:
        total = reference.sums(wide(x).reshape(b * h, n, d), members.reshape(b * h, n), clusters).contiguous()
    return total.view(b, h, clusters, d)


@_sums.register_fake
def _(x: Tensor, members: Tensor, clusters: int, triton: bool) -> Tensor:
    return x.new_empty((*x.shape[:2], clusters, x.shape[3]), dtype=torch.promote_types(x.dtype, torch.float32))


def _keep_members(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.dtype = inputs[0].dtype


def _give_back_sums(ctx: Any, d_sums: Tensor) -> tuple[Any, ...]:
    (members,) = ctx.saved_tensors
    return take(d_sums.to(ctx.dtype), members).masked_fill((members < 0).unsqueeze(-1), 0.0), None, None, None


_sums.register_autograd(_give_back_sums, setup_context=_keep_members)


def _flat(x: Tensor | None, lead: torch.Size, keep: int) -> Tensor | None:
    """Expand the leading dimensions to ``lead`` and fold them into one."""
    return None if x is None else x.expand(*lead, *x.shape[x.dim() - keep :]).flatten(0, len(lead) - 1)


def _four(points: Tensor) -> Tensor:
    """(b h n w), whatever stands between b and n."""
    return points if points.dim() == 4 else points.flatten(1, -3)


def codes(x: Tensor, planes: Tensor, thresholds: Tensor | None) -> Tensor:
    """Which side of each plane (d w) a vector lies on, as signs +1/-1: (... n w)."""
    projected = wide(x) @ planes.to(wide(x).dtype)
    if thresholds is not None:
        projected = projected - thresholds.to(projected.dtype)
    return torch.where(projected > 0, 1.0, -1.0).to(x.dtype)


def lloyd(
    points: Tensor, valid: Tensor, centroids: Tensor, alive: Tensor, *,
    updates: int, signs: bool = False, origin: Tensor | None = None, form: Tensor | None = None,
    backend: str = "reference",
) -> Tensor:  # fmt: skip
    """Centroids (... c w) after ``updates`` rounds over the valid points (... n w). ``alive`` (... c) may win points.

    origin (... 1 w) is taken off the points, and is what the centroids are relative to; form (... w w) makes the
    metric; signs: points are codes, the metric is Hamming's.
    """
    lead = points.shape[:-2]
    flat: Tensor = _lloyd(
        _four(points), _flat(valid, lead, 1), _flat(origin, lead, 2), _flat(centroids, lead, 2), _flat(alive, lead, 1),
        _flat(form, lead, 2), updates, signs, serve("lloyd", backend, kernels.why_not(points)),
    )  # fmt: skip
    return flat.view(*lead, *centroids.shape[-2:])


def assign(
    points: Tensor, centroids: Tensor, alive: Tensor, *,
    signs: bool = False, origin: Tensor | None = None, form: Tensor | None = None, backend: str = "reference",
) -> Tensor:  # fmt: skip
    """The best centroid of every point: (... n). With ``signs`` simply the largest product."""
    lead = points.shape[:-2]
    flat: Tensor = _assign(
        _four(points), _flat(origin, lead, 2), _flat(centroids, lead, 2), _flat(alive, lead, 1), _flat(form, lead, 2),
        signs, serve("assign", backend, kernels.why_not(points)),
    )  # fmt: skip
    return flat.view(*lead, points.shape[-2])


def farthest(
    points: Tensor, valid: Tensor, clusters: int, *, signs: bool = False, form: Tensor | None = None
) -> Tensor:
    """Positions (... c) of points far apart in the metric, -1 once the valid ones are used up."""
    lead = points.shape[:-2]
    flat: Tensor = _farthest(_flat(points, lead, 2), _flat(valid, lead, 1), clusters, _flat(form, lead, 2), signs)
    return flat.view(*lead, clusters)


def means(x: Tensor, members: Tensor, counts: Tensor, *, backend: str = "reference") -> Tensor:
    """The mean of each cluster's members (b h c d), with gradient to x; 0 for an empty cluster. members -1: nobody's.

    In the dtype of x: whoever compares a query with its centroid must see the centroid that attended.
    """
    sums: Tensor = _sums(x, members, counts.shape[-1], serve("means", backend, kernels.why_not(x)))
    return (sums / counts.clamp(min=1).unsqueeze(-1)).to(x.dtype)


def covariance(k: Tensor, keep: Tensor | None, heads: int, *, backend: str = "reference") -> Tensor:
    """Cov(K) over the real keys, for each query head: k (b hk m d), keep (b m) -> (b h d d). No gradient."""
    cov: Tensor = _covariance(k, keep, serve("covariance", backend, kernels.why_not(k)))
    return cov if heads == k.shape[1] else cov.repeat_interleave(heads // k.shape[1], 1)
