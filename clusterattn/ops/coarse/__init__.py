"""coarse: centroids attend to all keys; and top_keys, its exhaustive cousin for the oracle.

Torch.library ops: compiled graphs see one node whatever the length, and backward recomputes the (c x m) weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from ..._types import Attended, Mask
from .._chunks import no_autocast
from .._jit import use_kernel
from . import kernels, reference
from .reference import Reach as Reach


@dataclass(frozen=True)
class Coarse:
    """What each centroid says: the far part, its mean key, and which keys are near."""

    far: Attended  # (b h c e), (b h c): over all but the near keys
    mean_key: Tensor  # (b h c d), or (b h c 0) when not asked for
    near_at: Tensor  # (b h c t), -1 = no such key
    near_lse: Tensor  # (b h c)


_Fields = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("clusterattn::coarse", mutates_args=())
def _coarse(
    c: Tensor, k: Tensor, v: Tensor, key_mask: Optional[Tensor],
    scale: float, top: int, tangent: bool, per: int, first: int, step: int, triton: bool,
) -> _Fields:  # fmt: skip
    reach = Reach(scale, top, tangent, per, first, step)
    if triton:
        return kernels.forward(c, k, v, key_mask, reach)
    return *reference.forward(c, k, v, key_mask, reach), c.new_empty((*c.shape[:3], 0), dtype=torch.int32)


@_coarse.register_fake
def _(
    c: Tensor, k: Tensor, v: Tensor, key_mask: Optional[Tensor],
    scale: float, top: int, tangent: bool, per: int, first: int, step: int, triton: bool,
) -> _Fields:  # fmt: skip
    lead, acc, few = c.shape[:3], torch.promote_types(c.dtype, torch.float32), min(top, k.shape[2])
    return (
        c.new_empty((*lead, v.shape[3]), dtype=acc), c.new_empty((*lead, c.shape[3] if tangent else 0), dtype=acc),
        c.new_empty(lead, dtype=acc), c.new_empty(lead, dtype=acc), c.new_empty((*lead, few), dtype=torch.int64),
        c.new_empty((*lead, (k.shape[2] + 31) // 32 if triton and top else 0), dtype=torch.int32),
    )  # fmt: skip


@torch.library.custom_op("clusterattn::coarse_backward", mutates_args=())
def _coarse_backward(
    d_out: Tensor, d_mean: Tensor, d_lse: Tensor, d_near: Tensor,
    c: Tensor, k: Tensor, v: Tensor, key_mask: Optional[Tensor],
    out: Tensor, mean_key: Tensor, lse: Tensor, near_lse: Tensor, near_at: Tensor, near_bits: Tensor,
    scale: float, top: int, tangent: bool, per: int, first: int, step: int, triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    reach, gradients = Reach(scale, top, tangent, per, first, step), (d_out, d_mean, d_lse, d_near)
    with no_autocast(c):
        if triton:
            return kernels.backward(*gradients, c, k, v, key_mask, out, mean_key, lse, near_lse, near_bits, reach)
        return reference.backward(*gradients, c, k, v, key_mask, out, mean_key, lse, near_lse, near_at, reach)


@_coarse_backward.register_fake
def _(
    d_out: Tensor, d_mean: Tensor, d_lse: Tensor, d_near: Tensor, c: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = k.dtype if rest[-1] else d_lse.dtype
    dc, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (c, k, v))
    return dc, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: _Fields) -> None:
    c, k, v, key_mask, *ctx.settings = inputs
    ctx.save_for_backward(c, k, v, key_mask, *output)
    ctx.mark_non_differentiable(output[4], output[5])


def _give_back(ctx: Any, d_out: Tensor, d_mean: Tensor, d_lse: Tensor, d_near: Tensor, *_: Any) -> tuple[Any, ...]:
    c, k, v, *rest = ctx.saved_tensors
    dc, dk, dv = _coarse_backward(d_out, d_mean, d_lse, d_near, c, k, v, *rest, *ctx.settings)
    return dc.to(c.dtype), dk.to(k.dtype), dv.to(v.dtype), *[None] * 8


_coarse.register_autograd(_give_back, setup_context=_keep)


def coarse(
    c: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, *,
    top: int, tangent: bool, blocks: tuple[int, int, int] = (0, 0, 0), backend: str = "reference",
) -> Coarse:  # fmt: skip
    """Centroids c (b h c d) over the keys. blocks = (clusters per block, keys before block 1, keys per block)."""
    triton = use_kernel("coarse", backend, kernels.why_not(c, k, v))
    out, mean_key, lse, near_lse, near_at, _ = _coarse(c, k, v, mask.keys, scale, top, tangent, *blocks, triton)
    return Coarse(Attended(out, lse), mean_key, near_at, near_lse)


@torch.library.custom_op("clusterattn::top_keys", mutates_args=())
def _top_keys(q: Tensor, k: Tensor, key_mask: Optional[Tensor], top: int, causal: bool) -> Tensor:
    return reference.top_keys(q, k, key_mask, top, causal)


@_top_keys.register_fake
def _(q: Tensor, k: Tensor, key_mask: Optional[Tensor], top: int, causal: bool) -> Tensor:
    return q.new_empty((*q.shape[:3], min(top, k.shape[2])), dtype=torch.int64)


def top_keys(q: Tensor, k: Tensor, mask: Mask, scale: float, top: int) -> Tensor:
    """The best visible keys of every query, by exhaustive search: (b h n t)."""
    near_at: Tensor = _top_keys(q.detach() * scale, k.detach(), mask.keys, top, mask.causal)
    return near_at
