"""coarse: centroids attend to all keys; and top_keys, its exhaustive cousin for the oracle.

Torch.library ops: compiled graphs see one node whatever the length, and backward recomputes the (c x m) weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from ..._types import Mask, Parts
from .._chunks import no_autocast
from .._jit import use_kernel
from . import kernels, reference
from .reference import Found, Gradients, Reach


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


@torch.library.custom_op("clusterattn::coarse", mutates_args=())
def _coarse(
    c: Tensor, k: Tensor, v: Tensor, key_mask: Optional[Tensor], part_of: Optional[Tensor], pi: Optional[Tensor],
    scale: float, top: int, tangent: bool, per: int, first: int, step: int, parts: int, triton: bool,
) -> _Fields:  # fmt: skip
    reach = Reach(scale, top, tangent, per, first, step, parts)
    if triton:
        out, mean_key, lse, near_lse, near_at, bits = kernels.forward(c, k, v, key_mask, reach)
        slope = out.new_empty((*c.shape[:2], 0, c.shape[3], v.shape[3]))
        return out.unsqueeze(3), mean_key.unsqueeze(3), lse.unsqueeze(3), near_lse, near_at, slope, bits
    found = reference.forward(c, k, v, key_mask, part_of, pi, reach)
    none = c.new_empty((*c.shape[:3], 0), dtype=torch.int32)
    return found.out, found.mean_key, found.lse, found.near_lse, found.near_at, found.slope, none


@_coarse.register_fake
def _(
    c: Tensor, k: Tensor, v: Tensor, key_mask: Optional[Tensor], part_of: Optional[Tensor], pi: Optional[Tensor],
    scale: float, top: int, tangent: bool, per: int, first: int, step: int, parts: int, triton: bool,
) -> _Fields:  # fmt: skip
    lead, acc, few = c.shape[:3], torch.promote_types(c.dtype, torch.float32), min(top, k.shape[2])
    blocks = 0 if pi is None else (c.shape[2] + per - 1) // per if per else 1
    return (
        c.new_empty((*lead, parts, v.shape[3]), dtype=acc),
        c.new_empty((*lead, parts, c.shape[3] if tangent else 0), dtype=acc),
        c.new_empty((*lead, parts), dtype=acc), c.new_empty(lead, dtype=acc),
        c.new_empty((*lead, few), dtype=torch.int64),
        c.new_empty((*c.shape[:2], blocks, c.shape[3], v.shape[3]), dtype=acc),
        c.new_empty((*lead, (k.shape[2] + 31) // 32 if triton and top else 0), dtype=torch.int32),
    )  # fmt: skip


@torch.library.custom_op("clusterattn::coarse_backward", mutates_args=())
def _coarse_backward(
    d_out: Optional[Tensor], d_mean: Optional[Tensor], d_lse: Optional[Tensor], d_near: Optional[Tensor],
    d_slope: Optional[Tensor],
    c: Tensor, k: Tensor, v: Tensor, key_mask: Optional[Tensor], part_of: Optional[Tensor], pi: Optional[Tensor],
    out: Tensor, mean_key: Tensor, lse: Tensor, near_lse: Tensor, near_at: Tensor, slope: Tensor, near_bits: Tensor,
    scale: float, top: int, tangent: bool, per: int, first: int, step: int, parts: int, triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    reach = Reach(scale, top, tangent, per, first, step, parts)
    found = Found(out, mean_key, lse, near_lse, near_at, slope)
    given = Gradients(d_out, d_mean, d_lse, d_near, d_slope)
    with no_autocast(c):
        if triton:
            d_out, d_mean, d_lse = (
                torch.zeros_like(x) if given is None else given
                for given, x in ((d_out, out), (d_mean, mean_key), (d_lse, lse))
            )
            dc, dk, dv = kernels.backward(
                d_out, d_mean, d_lse, d_near, c, k, v, key_mask, out, mean_key, lse, near_lse, near_bits, reach
            )
        else:
            dc, dk, dv = reference.backward(given, c, k, v, key_mask, part_of, pi, found, reach)
    return dc.to(c.dtype), dk.to(k.dtype), dv.to(v.dtype)


@_coarse_backward.register_fake
def _(
    d_out: Optional[Tensor], d_mean: Optional[Tensor], d_lse: Optional[Tensor], d_near: Optional[Tensor],
    d_slope: Optional[Tensor], c: Tensor, k: Tensor, v: Tensor, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dc, dk, dv = (x.new_empty(x.shape) for x in (c, k, v))
    return dc, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: _Fields) -> None:
    ctx.settings = inputs[6:]
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[4], output[6])


def _give_back(
    ctx: Any, d_out: Any, d_mean: Any, d_lse: Any, d_near: Any, _at: Any, d_slope: Any, _bits: Any
) -> tuple[Any, ...]:
    gradients = _coarse_backward(d_out, d_mean, d_lse, d_near, d_slope, *ctx.saved_tensors, *ctx.settings)
    return *gradients, *[None] * 11


_coarse.register_autograd(_give_back, setup_context=_keep)


def coarse(
    c: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, *,
    top: int, tangent: bool, parts: Parts | None = None, shares: Tensor | None = None,
    blocks: tuple[int, int, int] = (0, 0, 0), backend: str = "reference",
) -> Coarse:  # fmt: skip
    """Centroids c (b h c d) over the keys. blocks = (clusters per block, keys before block 1, keys per block).

    shares (b h c): each cluster's share of the queries, where the slope of the far values is wanted (then with
    tangent=True).
    """
    count, part_of = (1, None) if parts is None else (parts.count, parts.labels)
    triton = use_kernel("coarse", backend, kernels.why_not(c, k, v, count, shares is not None))
    out, mean_key, lse, near_lse, near_at, slope, _ = _coarse(
        c, k, v, mask.keys, part_of, shares, scale, top, tangent, *blocks, count, triton
    )
    return Coarse(out, lse, mean_key, near_at, near_lse, None if shares is None else slope)


@torch.library.custom_op("clusterattn::top_keys", mutates_args=())
def _top_keys(q: Tensor, k: Tensor, key_mask: Optional[Tensor], top: int, causal: bool) -> Tensor:
    return reference.top_keys(q, k, key_mask, top, causal)


@_top_keys.register_fake
def _(q: Tensor, k: Tensor, key_mask: Optional[Tensor], top: int, causal: bool) -> Tensor:
    return q.new_empty((*q.shape[:3], min(top, k.shape[2])), dtype=torch.int64)


def top_keys(q: Tensor, k: Tensor, mask: Mask, scale: float, top: int, *, backend: str = "reference") -> Tensor:
    """The best visible keys of every query, by exhaustive search: (b h n t)."""
    near_at: Tensor = _top_keys(q.detach() * scale, k.detach(), mask.keys, top, mask.causal)
    return near_at
