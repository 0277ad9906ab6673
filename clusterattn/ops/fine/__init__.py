"""near_and_far: centroids choose their near keys and average the far ones; each query then attends exactly to the near
keys of its own cluster, and to the far ones as to one more key.

The definition is coarse, then a seating plan for bucketed attention: the queries of one cluster fill tiles, and each
tile sits with the keys of its cluster. The kernels are one op, so that a key's gradients as a near and as a far key are
added where they are made.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._types import Attended, Buckets, Mask, Members
from .. import tables
from .._chunks import no_autocast, wide
from .._jit import use_kernel
from ..bucketed import bucketed
from ..coarse import Coarse, Reach, coarse
from ..merge import NEVER
from ..rows import broadcast, take
from . import kernels

TILE = 32  # queries of one cluster that attend together

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


def near_and_far(
    q: Tensor, c: Tensor, k: Tensor, v: Tensor, labels: Tensor, mask: Mask, scale: float, *,
    top: int, mass: str, detach_mass: bool = False, blocks: tuple[int, int, int] = (0, 0, 0),
    members: Members | None = None, backend: str = "reference",
) -> Attended:  # fmt: skip
    """q (b h n d), centroids c (b h c d), k (b hk m d), v (b hk m e), labels (b h n) with -1 for nobody's and their
    members. mass: how the far part weighs for each query, see Improved; blocks: see coarse."""
    if use_kernel("near_and_far", backend, kernels.why_not(q, k, v, c.shape[2], top)):
        assert members is not None  # made wherever kernels are
        settings = (scale, top, *blocks, kernels.MASSES[mass], detach_mass)
        out, lse, *_ = _near_and_far(q, c, k, v, mask.keys, members.order, members.first, *settings)
        return Attended(out, lse)
    found = coarse(c, k, v, mask, scale, top=top, tangent=mass == "tangent", blocks=blocks)
    return _fine(q, c, k, v, labels, found, scale, mass, detach_mass)


def _fine(
    q: Tensor, c: Tensor, k: Tensor, v: Tensor, labels: Tensor, found: Coarse, scale: float, mass: str, detach: bool
) -> Attended:
    """Each query over its cluster's near keys, and the far ones as one."""
    keys, values, level = (
        take(k, found.near_at),
        take(v, found.near_at),
        found.far.lse,
    )  # (b h c t d) (b h c t e) (b h c)
    bias = torch.where(found.near_at < 0, NEVER, 0.0).to(level.dtype)
    if mass == "cluster":
        # Far weighs against near for each query as it does for the centroid (eqs. 9-11). That share is one number for
        # the cluster, and the near weights sum to one: so the far answer can be mixed into the near values beforehand.
        odds = torch.where(level == NEVER, NEVER, level - torch.where(found.near_lse == NEVER, 0.0, found.near_lse))
        share = odds.sigmoid()[..., None, None]
        mixed = (1 - (share.detach() if detach else share)) * values + share * found.far.out.unsqueeze(3)
        near = _by_tiles(q, labels, keys, mixed.to(values.dtype), bias, scale)
        return Attended(near.out, near.lse + broadcast(F.softplus(odds), labels))
    # The far keys act as one: with their mean as the key, its logit is the tangent of the far log-sum-exp at the
    # centroid; with a zero key, that log-sum-exp itself.
    key = found.mean_key.to(k.dtype) if mass == "tangent" else torch.zeros_like(c)
    level = level - (wide(c) * wide(key)).sum(-1) * scale
    return _by_tiles(
        q, labels, torch.cat([keys, key.unsqueeze(3)], 3),
        torch.cat([values, found.far.out.unsqueeze(3).to(v.dtype)], 3), torch.cat([bias, level.unsqueeze(3)], 3), scale,
    )  # fmt: skip


def _by_tiles(q: Tensor, labels: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Attended:
    c, t = keys.shape[2:4]
    table, first = tables.tiles(labels, c, TILE)
    seats = tables.family_of(first, table.shape[2]).unsqueeze(-1) * t + torch.arange(t, device=q.device)
    everything = Mask(q.shape[2], c * t)  # what may be seen is already in the choice of keys and in the bias
    return bucketed(
        q, keys.flatten(2, 3), values.flatten(2, 3), Buckets(table, seats), everything, scale, bias=bias.flatten(2, 3)
    )
