"""coarse: centroids attend to all keys; closest, who lies next to each; and top_keys, the oracle's exhaustive cousin.

Compiled graphs see one node whatever the length, and backward recomputes the (c x m) weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from ..._types import Mask, Parts
from .. import _backends
from .._op import op
from .reference import SLOPE_CLUSTERS, Found, Gradients, Reach

__all__ = ["SLOPE_CLUSTERS", "Coarse", "Reach", "closest", "coarse", "shares", "top_keys"]


@dataclass(frozen=True)
class Coarse:
    """What each centroid found: for every part of the far keys its weight, mean value and mean key; which keys are
    near; and, for a head (or for each block of a causal call), how the far values move with the query."""

    out: Tensor  # (b h c p e)
    lse: Tensor  # (b h c p): over all but the near keys
    mean_key: Tensor  # (b h c p d), or (b h c p 0) when not asked for
    near_at: Tensor  # (b h c t), -1 = no such key
    near_lse: Tensor  # (b h c)
    slope: Tensor | None  # (b h blocks d e)


_Fields = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@op("coarse")
def _coarse(
    c: Tensor, k: Tensor, v: Tensor, key_mask: Optional[Tensor], part_of: Optional[Tensor], pi: Optional[Tensor],
    scale: float, top: int, tangent: bool, per: int, first: int, step: int, parts: int, backend: str,
) -> _Fields:  # fmt: skip
    reach = Reach(scale, top, tangent, per, first, step, parts)
    found, bits = _backends.function("coarse", backend)(c, k, v, key_mask, part_of, pi, reach)
    return found.out, found.mean_key, found.lse, found.near_lse, found.near_at, found.slope, bits


@_coarse.fake
def _(
    c: Tensor, k: Tensor, v: Tensor, key_mask: Optional[Tensor], part_of: Optional[Tensor], pi: Optional[Tensor],
    scale: float, top: int, tangent: bool, per: int, first: int, step: int, parts: int, backend: str,
) -> _Fields:  # fmt: skip
    lead, acc, few = c.shape[:3], torch.promote_types(c.dtype, torch.float32), min(top, k.shape[2])
    blocks = 0 if pi is None else (c.shape[2] + per - 1) // per if per else 1
    words = (k.shape[2] + 31) // 32 if backend != _backends.REFERENCE and top else 0
    return (
        c.new_empty((*lead, parts, v.shape[3]), dtype=acc),
        c.new_empty((*lead, parts, c.shape[3] if tangent else 0), dtype=acc),
        c.new_empty((*lead, parts), dtype=acc), c.new_empty(lead, dtype=acc),
        c.new_empty((*lead, few), dtype=torch.int64),
        c.new_empty((*c.shape[:2], blocks, c.shape[3], v.shape[3]), dtype=acc),
        c.new_empty((*c.shape[:2], words, c.shape[2]), dtype=torch.int32),
    )  # fmt: skip


@op("coarse_backward")
def _coarse_backward(
    gradients: Sequence[Optional[Tensor]], c: Tensor, k: Tensor, v: Tensor, key_mask: Optional[Tensor],
    part_of: Optional[Tensor], pi: Optional[Tensor], answer: Sequence[Tensor], scale: float, sizes: Sequence[int],
    tangent: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """gradients: of out, mean_key, lse, near_lse and slope; answer and sizes: as the op of forward gives and takes."""
    *found, bits = answer
    top, per, first, step, parts = sizes
    reach = Reach(scale, top, tangent, per, first, step, parts)
    backward = _backends.backward("coarse", backend)
    dc, dk, dv = backward(Gradients(*gradients), c, k, v, key_mask, part_of, pi, Found(*found), bits, reach)
    return dc.to(c.dtype), dk.to(k.dtype), dv.to(v.dtype)


@_coarse_backward.fake
def _(gradients: Sequence[Optional[Tensor]], c: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dc, dk, dv = (x.new_empty(x.shape) for x in (c, k, v))
    return dc, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: _Fields) -> None:
    ctx.settings = inputs[6:]
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.mark_non_differentiable(output[4], output[6])


def _give_back(
    ctx: Any, d_out: Any, d_mean: Any, d_lse: Any, d_near: Any, _at: Any, d_slope: Any, _bits: Any
) -> tuple[Any, ...]:
    c, k, v, key_mask, part_of, pi, *answer = ctx.saved_tensors
    scale, top, tangent, *sizes, backend = ctx.settings
    gradients = [d_out, d_mean, d_lse, d_near, d_slope]
    found: tuple[Any, ...] = _coarse_backward(
        gradients, c, k, v, key_mask, part_of, pi, answer, scale, [top, *sizes], tangent, backend
    )
    return found


_coarse.gradient(_give_back, _keep)


def multiply_adds(reach: Reach, c: Any, k: Any, v: Any, slope: bool, *, backward: bool = False) -> int:
    """Of the centroids over the keys, from shapes: what ``Improved.cost`` says of them. Backward makes the weights
    again; then each product of forward is two."""
    (b, h, rows, d), m, e = c, k[2], v[3]
    widths = (3 if backward else 1) * d + (2 if backward else 1) * (e + (d if reach.tangent else 0))
    total = 0
    for block, keys in reach.blocks(rows, m):
        clusters = block.stop - block.start
        few = min(clusters, SLOPE_CLUSTERS)
        total += clusters * keys * widths
        total += (2 if backward else 1) * ((keys + few * reach.parts) * d * e + few * keys) if slope and keys else 0
    return int(b * h * total)


@_coarse.flops
def _(c: Any, k: Any, v: Any, key_mask: Any, part_of: Any, pi: Any, *settings: Any) -> int:
    return 2 * multiply_adds(Reach(*settings[:-1]), c, k, v, pi is not None)


@_coarse_backward.flops
def _(
    gradients: Any, c: Any, k: Any, v: Any, key_mask: Any, part_of: Any, pi: Any, answer: Any, scale: float, sizes: Any,
    tangent: bool, *_: Any,
) -> int:  # fmt: skip
    top, *rest = sizes
    return 2 * multiply_adds(Reach(scale, top, tangent, *rest), c, k, v, pi is not None, backward=True)


def coarse(
    c: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, *,
    top: int, tangent: bool, parts: Parts | None = None, shares: Tensor | None = None,
    blocks: tuple[int, int, int] = (0, 0, 0), backend: str = "reference",
) -> Coarse:  # fmt: skip
    """Centroids c (b h c d) over the keys. blocks = (clusters per block, keys before block 1, keys per block).

    shares (b h c): each cluster's share of the queries of the first SLOPE_CLUSTERS (of its block), 0 for the others,
    where the slope of the far values is wanted (then with tangent=True).
    """
    count, part_of = (1, None) if parts is None else (parts.count, parts.labels)
    name = _backends.serving("coarse", backend, c, k, v, count, shares is not None)
    out, mean_key, lse, near_lse, near_at, slope, _ = _coarse(
        c, k, v, mask.keys, part_of, shares, scale, top, tangent, *blocks, count, name
    )
    return Coarse(out, lse, mean_key, near_at, near_lse, None if shares is None else slope)


@op("shares")
def _shares(counts: Tensor, like: Tensor, per: int, backend: str) -> Tensor:
    found: Tensor = _backends.function("shares", backend)(counts, like, per)
    return found


@_shares.fake
def _(counts: Tensor, like: Tensor, per: int, backend: str) -> Tensor:
    return like.new_empty(counts.shape, dtype=torch.promote_types(like.dtype, torch.float32))


def shares(counts: Tensor, per: int, like: Tensor, *, backend: str = "reference") -> Tensor:
    """From the clusters' members (b h c), ``per`` clusters to a block (0: one block), their shares as ``coarse`` wants
    them, in the dtype of ``like`` or better."""
    found: Tensor = _shares(counts, like.detach(), per or counts.shape[-1], _backends.serving("shares", backend, like))
    return found


@op("top_keys")
def _top_keys(q: Tensor, k: Tensor, key_mask: Optional[Tensor], top: int, causal: bool) -> Tensor:
    from . import exhaustive

    return exhaustive.top_keys(q, k, key_mask, top, causal)


@_top_keys.fake
def _(q: Tensor, k: Tensor, key_mask: Optional[Tensor], top: int, causal: bool) -> Tensor:
    return q.new_empty((*q.shape[:3], min(top, k.shape[2])), dtype=torch.int64)


@_top_keys.flops
def _(q: Any, k: Any, *_: Any) -> int:
    b, h, n, d = q
    return int(2 * b * h * n * k[2] * d)


def top_keys(q: Tensor, k: Tensor, mask: Mask, scale: float, top: int, *, backend: str = "reference") -> Tensor:
    """The best visible keys of every query, by exhaustive search: (b h n t)."""
    near_at: Tensor = _top_keys(q.detach() * scale, k.detach(), mask.keys, top, mask.causal)
    return near_at


@op("closest")
def _closest(c: Tensor, points: Tensor, valid: Optional[Tensor], top: int, backend: str) -> Tensor:
    found: Tensor = _backends.function("closest", backend)(c, points, valid, top)
    return found


@_closest.fake
def _(c: Tensor, points: Tensor, valid: Optional[Tensor], top: int, backend: str) -> Tensor:
    return c.new_empty((*c.shape[:3], top), dtype=torch.int64)


@_closest.flops
def _(c: Any, points: Any, *_: Any) -> int:
    b, h, rows, d = c
    return int(2 * b * h * rows * points[2] * d)


def closest(c: Tensor, points: Tensor, valid: Tensor | None, top: int, *, backend: str = "reference") -> Tensor:
    """The ``top`` valid (b n; None: all) points (b h n d) with the largest products with each of c (b h c d), in any
    order: (b h c top), -1 where there are fewer. No gradient."""
    found: Tensor = _closest(c, points, valid, top, _backends.serving("closest", backend, c, points, top))
    return found
