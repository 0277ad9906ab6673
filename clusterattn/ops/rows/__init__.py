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
from .. import _backends
from .._backends import REFERENCE, serving
from .._op import op


def flat_index(at: Tensor, heads: int, length: int) -> Tensor:
    """Positions (b h ...) in each sequence -> row numbers of a (b heads length) tensor flattened to rows.

    ``heads`` may be fewer than h (grouped heads). -1 becomes the first row of its own sequence, never of another one.
    """
    b, h = at.shape[:2]
    sequence = torch.arange(b, device=at.device)[:, None] * heads + torch.arange(h, device=at.device) // (h // heads)
    return at.clamp(min=0) + (sequence * length).view(b, h, *[1] * (at.dim() - 2))


def plain_take(x: Tensor, at: Tensor) -> Tensor:
    """The forward of take, for everybody."""
    rows = x.flatten(0, 2).index_select(0, flat_index(at, x.shape[1], x.shape[2]).reshape(-1))
    return rows.view(*at.shape, x.shape[-1])


@op("take")
def _take(x: Tensor, at: Tensor, backend: str) -> Tensor:
    rows: Tensor = _backends.function("take", backend)(x, at)
    return rows


@_take.fake
def _(x: Tensor, at: Tensor, backend: str) -> Tensor:
    return x.new_empty((*at.shape, x.shape[-1]))


@op("take_backward")
def _take_backward(d_rows: Tensor, at: Tensor, heads: int, length: int, backend: str) -> Tensor:
    found: Tensor = _backends.backward("take", backend)(d_rows, at, heads, length)
    return found


@_take_backward.fake
def _(d_rows: Tensor, at: Tensor, heads: int, length: int, backend: str) -> Tensor:
    return d_rows.new_empty((at.shape[0], heads, length, d_rows.shape[-1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, at, backend = inputs
    ctx.save_for_backward(at)
    ctx.settings = (*x.shape[1:3], backend)


def _give_back(ctx: Any, d_rows: Tensor | None) -> Any:
    return None if d_rows is None else _take_backward(d_rows, *ctx.saved_tensors, *ctx.settings)


_take.gradient(_give_back, _keep)


@op("broadcast")
def _broadcast(rows: Tensor, labels: Tensor, order: Optional[Tensor], first: Optional[Tensor], backend: str) -> Tensor:
    shared: Tensor = _backends.function("broadcast", backend)(rows, labels)
    return shared


@_broadcast.fake
def _(rows: Tensor, labels: Tensor, order: Optional[Tensor], first: Optional[Tensor], backend: str) -> Tensor:
    return rows.new_empty((*labels.shape, rows.shape[-1]))


@op("broadcast_backward")
def _broadcast_backward(
    d_rows: Tensor, labels: Tensor, order: Optional[Tensor], first: Optional[Tensor], clusters: int, backend: str
) -> Tensor:
    found: Tensor = _backends.backward("broadcast", backend)(d_rows, labels, order, first, clusters)
    return found


@_broadcast_backward.fake
def _(
    d_rows: Tensor, labels: Tensor, order: Optional[Tensor], first: Optional[Tensor], clusters: int, backend: str
) -> Tensor:
    return d_rows.new_empty((*labels.shape[:2], clusters, d_rows.shape[-1]))


def _keep_labels(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])
    ctx.settings = (inputs[0].shape[2], inputs[4])


def _give_back_broadcast(ctx: Any, d_rows: Tensor | None) -> Any:
    return None if d_rows is None else _broadcast_backward(d_rows, *ctx.saved_tensors, *ctx.settings)


_broadcast.gradient(_give_back_broadcast, _keep_labels)


def take(x: Tensor, at: Tensor, *, backend: str = "reference") -> Tensor:
    """Rows ``x[b, h, at[b, h, ...]]`` of x (b hk m d): (b h ... d). -1 takes any row: nobody may read it."""
    name = serving("take", backend, x)
    rows: Tensor = plain_take(x, at) if name == REFERENCE else _take(x, at, name)
    return rows


def broadcast(
    per_cluster: Tensor, labels: Tensor, *, members: Members | None = None, backend: str = "reference"
) -> Tensor:
    """Hand a cluster's row (b h c x) or number (b h c) to its members (b h n x) or (b h n); 0 for label -1.

    members: of the labels, which spares backward making it.
    """
    number = per_cluster.dim() == 3
    rows = per_cluster.unsqueeze(-1) if number else per_cluster
    name = serving("broadcast", backend, rows)
    if name != REFERENCE:
        order, first = (members.order, members.first) if members is not None else (None, None)
        shared: Tensor = _broadcast(rows, labels, order, first, name)
    else:
        rows = F.pad(rows, (0, 0, 0, 1))  # one more row for those without a cluster
        shared = plain_take(rows, torch.where(labels < 0, rows.shape[2] - 1, labels))
    return shared.squeeze(-1) if number else shared
