"""near_and_far: centroids choose their near keys and average the far ones part by part; each query then attends exactly
to the near keys of its own cluster, and to each far part as to one more key.

The definition is coarse, then fine. The kernels are one op, so that a key's gradients as a near and as a far key are
added where they are made.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._types import Attended, Mask, Members, Parts
from .._chunks import no_autocast, wide
from .._jit import use_kernel
from ..coarse import Coarse, Reach, coarse
from ..merge import NEVER
from ..rows import broadcast, take
from . import kernels, reference

_Pair = tuple[Tensor, Tensor]
_Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("clusterattn::fine", mutates_args=())
def _fine(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, labels: Tensor, slope: Optional[Tensor], c: Optional[Tensor],
    scale: float, near: int, per: int,
) -> _Pair:  # fmt: skip
    return reference.forward(q, labels, reference.Offer(keys, values, bias, near, slope, c, per), scale)


@_fine.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, *_: Any) -> _Pair:
    acc = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], values.shape[-1]), dtype=acc), q.new_empty(q.shape[:3], dtype=acc)


@torch.library.custom_op("clusterattn::fine_backward", mutates_args=())
def _fine_backward(
    d_out: Optional[Tensor], d_lse: Optional[Tensor],
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, labels: Tensor, slope: Optional[Tensor], c: Optional[Tensor],
    out: Tensor, lse: Tensor, scale: float, near: int, per: int,
) -> _Six:  # fmt: skip
    offer = reference.Offer(keys, values, bias, near, slope, c, per)
    with no_autocast(q):
        d_out = torch.zeros_like(out) if d_out is None else d_out
        dq, dc, dk, dv, db, ds = reference.backward(d_out, d_lse, q, labels, offer, out, lse, scale)
    dc = q.new_empty(0) if dc is None or c is None else dc.to(c.dtype)
    ds = q.new_empty(0) if ds is None else ds
    return dq.to(q.dtype), dk.to(keys.dtype), dv.to(values.dtype), db, ds, dc


@_fine_backward.register_fake
def _(
    d_out: Optional[Tensor], d_lse: Optional[Tensor],
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, labels: Tensor, slope: Optional[Tensor], c: Optional[Tensor],
    *_: Any,
) -> _Six:  # fmt: skip
    none = q.new_empty(0)
    given = (q, keys, values, bias, none if slope is None else slope, none if c is None else c)
    dq, dk, dv, db, ds, dc = (x.new_empty(x.shape) for x in given)
    return dq, dk, dv, db, ds, dc


def _keep_fine(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    ctx.settings = inputs[7:]
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.set_materialize_grads(False)


def _give_back_fine(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    dq, dk, dv, db, ds, dc = _fine_backward(d_out, d_lse, *saved, *ctx.settings)
    return dq, dk, dv, db, None, *((None, None) if saved[5] is None else (ds, dc)), None, None, None


_fine.register_autograd(_give_back_fine, setup_context=_keep_fine)


def near_and_far(
    q: Tensor, c: Tensor, k: Tensor, v: Tensor, labels: Tensor, mask: Mask, scale: float, *,
    top: int, mass: str, detach_mass: bool = False, parts: Parts | None = None, shares: Tensor | None = None,
    blocks: tuple[int, int, int] = (0, 0, 0), members: Members | None = None, backend: str = "reference",
) -> Attended:  # fmt: skip
    """q (b h n d), centroids c (b h c d), k (b hk m d), v (b hk m e), labels (b h n) with -1 for nobody's and their
    members. mass: how the far part weighs for each query, see Improved; parts, shares (for the slope of the far values)
    and blocks: see coarse."""
    why_not = kernels.why_not(q, k, v, c.shape[2], top, parts, shares)
    if use_kernel("near_and_far", backend, why_not):
        assert members is not None  # made wherever kernels are
        settings = (scale, top, *blocks, kernels.MASSES[mass], detach_mass)
        out, lse, *_ = _near_and_far(q, c, k, v, mask.keys, members.order, members.first, *settings)
        return Attended(out, lse)
    tangent = mass == "tangent"
    found = coarse(c, k, v, mask, scale, top=top, tangent=tangent, parts=parts, shares=shares, blocks=blocks)
    return fine(q, c, k, v, labels, found, scale, mass, detach_mass, per=blocks[0])


def fine(
    q: Tensor, c: Tensor, k: Tensor, v: Tensor, labels: Tensor, found: Coarse, scale: float, mass: str, detach: bool,
    per: int = 0,
) -> Attended:  # fmt: skip
    """Each query over its cluster's near keys, and over each far part as one."""
    keys, values, level = take(k, found.near_at), take(v, found.near_at), found.lse  # (b h c t d) (b h c t e) (b h c p)
    bias = torch.where(found.near_at < 0, NEVER, 0.0).to(level.dtype)
    near = keys.shape[3]
    if mass == "cluster":
        # Far weighs against near for each query as it does for the centroid (eqs. 9-11). That share is one number for
        # the cluster, and the near weights sum to one: so the far answer can be mixed into the near values beforehand.
        level = level.squeeze(-1)
        odds = torch.where(level == NEVER, NEVER, level - torch.where(found.near_lse == NEVER, 0.0, found.near_lse))
        share = odds.sigmoid()[..., None, None]
        mixed = (1 - (share.detach() if detach else share)) * values + share * found.out
        out, lse = _fine(q, keys, mixed.to(values.dtype), bias, labels, None, None, scale, near, 0)
        return Attended(out, lse + broadcast(F.softplus(odds), labels))
    # The keys of a far part act as one: with their mean as the key, its logit is the tangent of their log-sum-exp at
    # the centroid; with a zero key, that log-sum-exp itself.
    key = found.mean_key.to(k.dtype) if mass == "tangent" else torch.zeros_like(c).unsqueeze(3)
    level = level - (wide(c).unsqueeze(3) * wide(key)).sum(-1) * scale
    out, lse = _fine(
        q, torch.cat([keys, key], 3), torch.cat([values, found.out.to(v.dtype)], 3), torch.cat([bias, level], 3),
        labels, found.slope, None if found.slope is None else c, scale, near, per,
    )  # fmt: skip
    return Attended(out, lse)


# ---------------------------------------------------------------------------------------------------- as one op

_Answer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
@torch.library.custom_op("clusterattn::near_and_far", mutates_args=())
def _near_and_far(
    q: Tensor, c: Tensor, k: Tensor, v: Tensor, keep: Optional[Tensor], order: Tensor, first: Tensor,
    scale: float, top: int, per: int, begin: int, step: int, mass: int, detach: bool,
) -> _Answer:  # fmt: skip
    reach = Reach(scale, top, mass == kernels.TANGENT, per, begin, step)
    out, lse, found = kernels.forward(q, c, k, v, keep, order, first, reach, mass)
    return out, lse, found.far, found.mean_key, found.far_lse, found.near_lse, found.near_at, found.bits


@_near_and_far.register_fake
def _(
    q: Tensor, c: Tensor, k: Tensor, v: Tensor, keep: Optional[Tensor], order: Tensor, first: Tensor,
    scale: float, top: int, per: int, begin: int, step: int, mass: int, detach: bool,
) -> _Answer:  # fmt: skip
    few, m, wide_ = c.shape[:3], k.shape[2], torch.float32
    return (
        q.new_empty((*q.shape[:3], v.shape[3]), dtype=v.dtype), q.new_empty(q.shape[:3], dtype=wide_),
        c.new_empty((*few, v.shape[3]), dtype=wide_),
        c.new_empty((*few, c.shape[3] if mass == kernels.TANGENT else 0), dtype=wide_),
        c.new_empty(few, dtype=wide_), c.new_empty(few, dtype=wide_),
        c.new_empty((*few, min(top, m)), dtype=torch.int64), c.new_empty((*few, (m + 31) // 32), dtype=torch.int32),
    )  # fmt: skip


@torch.library.custom_op("clusterattn::near_and_far_backward", mutates_args=())
def _near_and_far_backward(
    d_out: Tensor, d_lse: Tensor, q: Tensor, c: Tensor, k: Tensor, v: Tensor, keep: Optional[Tensor],
    order: Tensor, first: Tensor, out: Tensor, lse: Tensor,
    far: Tensor, mean_key: Tensor, far_lse: Tensor, near_lse: Tensor, near_at: Tensor, bits: Tensor,
    scale: float, top: int, per: int, begin: int, step: int, mass: int, detach: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    found = kernels.Found(far, mean_key, far_lse, near_lse, near_at, bits)
    reach = Reach(scale, top, mass == kernels.TANGENT, per, begin, step)
    with no_autocast(q):
        return kernels.backward(d_out, d_lse, q, c, k, v, keep, order, first, out, lse, found, reach, mass, detach)


@_near_and_far_backward.register_fake
def _(d_out: Tensor, d_lse: Tensor, q: Tensor, c: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), c.new_empty(c.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: _Answer) -> None:
    *tensors, ctx.settings = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors[0], *output)
    ctx.mark_non_differentiable(*output[2:])


def _give_back(ctx: Any, d_out: Tensor, d_lse: Tensor, *_: Any) -> tuple[Any, ...]:
    return *_near_and_far_backward(d_out, d_lse, *ctx.saved_tensors, *ctx.settings), *[None] * 10


_near_and_far.register_autograd(_give_back, setup_context=_keep)
