"""Moving whole rows: take them by position, hand a cluster's row to its members.

On a CPU both are plain indexing. On a GPU the gradient of plain indexing adds with atomics, in another order every
time; the kernels' versions add in the order of the positions.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._types import Members
from .._jit import use_kernel, why_no_kernels
from ..members import kernels as member_kernels
from . import kernels as row_kernels


def flat_index(at: Tensor, heads: int, length: int) -> Tensor:
    """Positions (b h ...) in each sequence -> row numbers of a (b heads length) tensor flattened to rows.

    ``heads`` may be fewer than h (grouped heads). -1 becomes the first row of its own sequence, never of another one.
    """
    b, h = at.shape[:2]
    sequence = torch.arange(b, device=at.device)[:, None] * heads + torch.arange(h, device=at.device) // (h // heads)
    return at.clamp(min=0) + (sequence * length).view(b, h, *[1] * (at.dim() - 2))


def _plain_take(x: Tensor, at: Tensor) -> Tensor:
    rows = x.flatten(0, 2).index_select(0, flat_index(at, x.shape[1], x.shape[2]).reshape(-1))
    return rows.view(*at.shape, x.shape[-1])


@torch.library.custom_op("clusterattn::take", mutates_args=())
def _take(x: Tensor, at: Tensor) -> Tensor:
    return _plain_take(x, at)


@_take.register_fake
def _(x: Tensor, at: Tensor) -> Tensor:
    return x.new_empty((*at.shape, x.shape[-1]))


@torch.library.custom_op("clusterattn::take_backward", mutates_args=())
def _take_backward(d_rows: Tensor, at: Tensor, heads: int, length: int) -> Tensor:
    from ..bucketed.kernels import gather_sum

    (b, h), d = at.shape[:2], d_rows.shape[-1]
    summed = gather_sum(at.reshape(b, h, 1, -1), length, d_rows.contiguous(), d).view(b, heads, h // heads, length, d)
    return summed.float().sum(2).to(d_rows.dtype) if heads != h else summed.squeeze(2).clone()


@_take_backward.register_fake
def _(d_rows: Tensor, at: Tensor, heads: int, length: int) -> Tensor:
    return d_rows.new_empty((at.shape[0], heads, length, d_rows.shape[-1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, at = inputs
    ctx.save_for_backward(at)
    ctx.shape = x.shape


def _give_back(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None]:
    return _take_backward(d_rows, ctx.saved_tensors[0], ctx.shape[1], ctx.shape[2]), None


_take.register_autograd(_give_back, setup_context=_keep)


@torch.library.custom_op("clusterattn::broadcast", mutates_args=())
def _broadcast(rows: Tensor, labels: Tensor, order: Optional[Tensor], first: Optional[Tensor]) -> Tensor:
    return row_kernels.broadcast(rows, labels)


@_broadcast.register_fake
def _(rows: Tensor, labels: Tensor, order: Optional[Tensor], first: Optional[Tensor]) -> Tensor:
    return rows.new_empty((*labels.shape, rows.shape[-1]))


@torch.library.custom_op("clusterattn::broadcast_backward", mutates_args=())
def _broadcast_backward(
    d_rows: Tensor, labels: Tensor, order: Optional[Tensor], first: Optional[Tensor], clusters: int
) -> Tensor:
    from ..kmeans.kernels import member_sums

    b, h, n = labels.shape
    if order is None or first is None:
        order, first = member_kernels.by_label(labels.reshape(b * h, n), clusters)
    return member_sums(d_rows, order, first, d_rows.dtype, mean=False)[0]


@_broadcast_backward.register_fake
def _(d_rows: Tensor, labels: Tensor, order: Optional[Tensor], first: Optional[Tensor], clusters: int) -> Tensor:
    return d_rows.new_empty((*labels.shape[:2], clusters, d_rows.shape[-1]))


def _keep_labels(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.clusters = inputs[0].shape[2]


def _give_back_broadcast(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None, None, None]:
    return _broadcast_backward(d_rows, *ctx.saved_tensors, ctx.clusters), None, None, None


_broadcast.register_autograd(_give_back_broadcast, setup_context=_keep_labels)


def take(x: Tensor, at: Tensor, *, backend: str = "reference") -> Tensor:
    """Rows ``x[b, h, at[b, h, ...]]`` of x (b hk m d): (b h ... d). -1 takes any row: nobody may read it."""
    return _take(x, at) if use_kernel("take", backend, why_no_kernels(x)) else _plain_take(x, at)


def broadcast(
    per_cluster: Tensor, labels: Tensor, *, members: Members | None = None, backend: str = "reference"
) -> Tensor:
    """Hand a cluster's row (b h c x) or number (b h c) to its members (b h n x) or (b h n); 0 for label -1.

    members: of the labels, which spares backward making it.
    """
    number = per_cluster.dim() == 3
    rows = per_cluster.unsqueeze(-1) if number else per_cluster
    if use_kernel("broadcast", backend, why_no_kernels(rows)):
        order, first = (members.order, members.first) if members is not None else (None, None)
        shared: Tensor = _broadcast(rows, labels, order, first)
    else:
        rows = F.pad(rows, (0, 0, 0, 1))  # one more row for those without a cluster
        shared = _plain_take(rows, torch.where(labels < 0, rows.shape[2] - 1, labels))
    return shared.squeeze(-1) if number else shared
