"""near_and_far: centroids choose their near keys and average the far ones part by part; each query then attends exactly
to the near keys of its own cluster, and to each far part as to one more key.

The definition is coarse, then fine. The kernels are one op, so that a key's gradients as a near and as a far key are
added where they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._types import Attended, Mask, Members, Parts
from .. import _backends
from .._chunks import wide
from .._launch import joined
from .._op import op
from ..coarse import Coarse, Reach, coarse
from ..coarse import multiply_adds as of_centroids
from ..members import members as sorted_members
from ..merge import NEVER
from ..rows import broadcast

MASSES = ("softmax", "tangent", "cluster")  # how the far part weighs, see Improved; the ops count them

_Pair = tuple[Tensor, Tensor]
_Eight = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@op("fine")
def _fine(
    q: Tensor, k: Tensor, v: Tensor, far_keys: Tensor, far_values: Tensor, bias: Tensor,
    slope: Optional[Tensor], c: Optional[Tensor], near_at: Tensor, labels: Tensor, scale: float, per: int,
) -> _Pair:  # fmt: skip
    from . import reference

    return reference.forward(
        q, labels, reference.Offer(k, v, near_at, far_keys, far_values, bias, slope, c, per), scale
    )


@_fine.fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> _Pair:
    acc = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[-1]), dtype=acc), q.new_empty(q.shape[:3], dtype=acc)


@op("fine_backward")
def _fine_backward(
    d_out: Optional[Tensor], d_lse: Optional[Tensor],
    q: Tensor, k: Tensor, v: Tensor, far_keys: Tensor, far_values: Tensor, bias: Tensor,
    slope: Optional[Tensor], c: Optional[Tensor], near_at: Tensor, labels: Tensor,
    out: Tensor, lse: Tensor, scale: float, per: int,
) -> _Eight:  # fmt: skip
    from . import reference

    offer = reference.Offer(k, v, near_at, far_keys, far_values, bias, slope, c, per)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    found = reference.backward(d_out, d_lse, q, labels, offer, out, lse, scale)
    dc = q.new_empty(0) if found.c is None or c is None else found.c.to(c.dtype)
    ds = q.new_empty(0) if found.slope is None else found.slope
    return (
        found.q.to(q.dtype), found.k.to(k.dtype), found.v.to(v.dtype), found.far_keys.to(far_keys.dtype),
        found.far_values.to(far_values.dtype), found.bias, ds, dc,
    )  # fmt: skip


@_fine_backward.fake
def _(
    d_out: Optional[Tensor], d_lse: Optional[Tensor],
    q: Tensor, k: Tensor, v: Tensor, far_keys: Tensor, far_values: Tensor, bias: Tensor,
    slope: Optional[Tensor], c: Optional[Tensor], *_: Any,
) -> _Eight:  # fmt: skip
    none = q.new_empty(0)
    given = (q, k, v, far_keys, far_values, bias, none if slope is None else slope, none if c is None else c)
    dq, dk, dv, d_far_keys, d_far_values, db, ds, dc = (x.new_empty(x.shape) for x in given)
    return dq, dk, dv, d_far_keys, d_far_values, db, ds, dc


def _keep_fine(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    ctx.settings = inputs[10:]
    ctx.save_for_backward(*inputs[:10], *output)


def _give_back_fine(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    *found, ds, dc = _fine_backward(d_out, d_lse, *saved, *ctx.settings)
    return *found, *((None, None) if saved[6] is None else (ds, dc))


_fine.gradient(_give_back_fine, _keep_fine)


def _of_queries(q: Any, keys: int, e: int, slope: bool, *, backward: bool = False) -> int:
    """Multiply-adds of the queries over so many keys each, from shapes, which do not tell who has no cluster."""
    b, h, n, d = q
    widths = 3 * d + 2 * e if backward else d + e
    return int(b * h * n * (keys * widths + ((2 if backward else 1) * d * e if slope else 0)))


@_fine.flops
def _(q: Any, k: Any, v: Any, far_keys: Any, far_values: Any, bias: Any, slope: Any, *_: Any) -> int:
    return 2 * _of_queries(q, bias[3], v[3], slope is not None)


@_fine_backward.flops
def _(
    d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, far_keys: Any, far_values: Any, bias: Any, slope: Any, *_: Any
) -> int:
    return 2 * _of_queries(q, bias[3], v[3], slope is not None, backward=True)


# ---------------------------------------------------------------------------------------------------- by kernels

_Answer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@op("near_and_far")
def _near_and_far(
    q: Tensor, c: Tensor, k: Tensor, v: Tensor, keep: Optional[Tensor], labels: Tensor, order: Tensor, first: Tensor,
    part_order: Optional[Tensor], part_first: Optional[Tensor], part_place: Optional[Tensor],
    part_largest: Optional[Tensor], pi: Optional[Tensor], counts: Optional[Tensor],
    scale: float, top: int, per: int, begin: int, step: int, parts: int, mass: int, detach: bool, backend: str,
) -> _Answer:  # fmt: skip
    reach = Reach(scale, top, MASSES[mass] == "tangent", per, begin, step, parts)
    by_part = _by_part(part_order, part_first, part_place, part_largest)
    answer: _Answer = _backends.function("near_and_far", backend)(
        q, c, k, v, keep, order, first, by_part, pi, reach, mass, detach
    )
    return answer


def _by_part(order: Tensor | None, first: Tensor | None, place: Tensor | None, largest: Tensor | None) -> Any:
    return None if order is None or first is None else Members(order, first, place, largest)


@_near_and_far.fake
def _(
    q: Tensor, c: Tensor, k: Tensor, v: Tensor, keep: Optional[Tensor], labels: Tensor, order: Tensor, first: Tensor,
    part_order: Optional[Tensor], part_first: Optional[Tensor], part_place: Optional[Tensor],
    part_largest: Optional[Tensor], pi: Optional[Tensor], counts: Optional[Tensor],
    scale: float, top: int, per: int, begin: int, step: int, parts: int, mass: int, detach: bool, backend: str,
) -> _Answer:  # fmt: skip
    (b, h, n, d), clusters, (m, e), wide_ = q.shape, c.shape[2], v.shape[2:], torch.float32
    lead, slope = b * h, pi is not None
    return (
        q.new_empty((b, h, n, e), dtype=v.dtype), q.new_empty((b, h, n), dtype=wide_),
        q.new_empty((b, h, n if slope else 0), dtype=wide_), q.new_empty((lead, parts, clusters, e), dtype=k.dtype),
        q.new_empty((lead, parts, clusters, d if MASSES[mass] == "tangent" else 0), dtype=k.dtype),
        q.new_empty((lead, parts, clusters), dtype=wide_), q.new_empty((lead, clusters), dtype=wide_),
        q.new_empty((lead, clusters, min(top, m)), dtype=torch.int64),
        q.new_empty((lead, (m + 31) // 32 if top else 0, clusters), dtype=torch.int32),
        q.new_empty((lead, 1 if slope else 0, d, e), dtype=k.dtype),
    )  # fmt: skip


@op("near_and_far_backward")
def _near_and_far_backward(
    d_out: Optional[Tensor], d_lse: Optional[Tensor], q: Tensor, c: Tensor, k: Tensor, v: Tensor,
    groups: Sequence[Optional[Tensor]], answer: Sequence[Tensor], scale: float, sizes: Sequence[int], detach: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """groups, answer, sizes: as the op of forward takes and gives them."""
    keep, labels, order, first, *by_part, pi, counts = groups
    out, lse, share, *far = answer
    top, per, begin, step, parts, mass = sizes
    reach = Reach(scale, top, MASSES[mass] == "tangent", per, begin, step, parts)
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _backends.backward("near_and_far", backend)(
        torch.zeros_like(out) if d_out is None else d_out, d_lse, q, c, k, v, keep, labels, order, first,
        _by_part(*by_part), pi, counts, out, lse, share, tuple(far), reach, mass, detach,
    )  # fmt: skip
    return found


@_near_and_far_backward.fake
def _(
    d_out: Optional[Tensor], d_lse: Optional[Tensor], q: Tensor, c: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), c.new_empty(c.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: _Answer) -> None:
    ctx.settings = inputs[14:]
    ctx.save_for_backward(*inputs[:14], *output)
    ctx.mark_non_differentiable(*output[2:])


def _give_back(ctx: Any, d_out: Any, d_lse: Any, *_: Any) -> tuple[Any, ...]:
    q, c, k, v, *rest = ctx.saved_tensors
    scale, *sizes, detach, backend = ctx.settings
    found: tuple[Any, ...] = _near_and_far_backward(
        d_out, d_lse, q, c, k, v, rest[:10], rest[10:], scale, sizes, detach, backend
    )
    return found


_near_and_far.gradient(_give_back, _keep)


def _of_both(
    q: Any, c: Any, k: Any, v: Any, pi: Any, scale: float, top: int, per: int, begin: int, step: int, parts: int,
    mass: int, *_: Any, backward: bool = False,
) -> int:  # fmt: skip
    """Multiply-adds of coarse and fine."""
    reach = Reach(scale, top, MASSES[mass] == "tangent", per, begin, step, parts)
    keys = min(top, k[2]) + (0 if MASSES[mass] == "cluster" else parts)
    slope = pi is not None
    queries = _of_queries(q, keys, v[3], slope, backward=backward)
    return of_centroids(reach, c, k, v, slope, backward=backward) + queries


@_near_and_far.flops
def _(q: Any, c: Any, k: Any, v: Any, *rest: Any) -> int:
    return 2 * _of_both(q, c, k, v, rest[8], *rest[10:])


@_near_and_far_backward.flops
def _(
    d_out: Any, d_lse: Any, q: Any, c: Any, k: Any, v: Any, groups: Any, answer: Any, scale: float, sizes: Any, *_: Any
) -> int:
    return 2 * _of_both(q, c, k, v, groups[8], scale, *sizes, backward=True)


# ---------------------------------------------------------------------------------------------------- the verb


def near_and_far(
    q: Tensor, c: Tensor, k: Tensor, v: Tensor, labels: Tensor, mask: Mask, scale: float, *,
    top: int, mass: str, detach_mass: bool = False, parts: Parts | None = None, shares: Tensor | None = None,
    blocks: tuple[int, int, int] = (0, 0, 0), members: Members | None = None, counts: Tensor | None = None,
    backend: str = "reference",
) -> Attended:  # fmt: skip
    """q (b h n d), centroids c (b h c d), k (b hk m d), v (b hk m e), labels (b h n) with -1 for nobody's and their
    members; counts (b h c) of those, where the centroids are their means. mass: how the far part weighs for each query,
    see Improved; parts, shares (for the slope of the far values) and blocks: see coarse."""
    causal, slope = blocks[0] > 0, shares is not None
    name = _backends.serving("near_and_far", backend, q, k, v, c.shape[2], parts, slope, causal)
    if name != _backends.REFERENCE:
        assert members is not None  # made wherever kernels are
        by_part: tuple[Tensor | None, ...] = (None,) * 4
        if parts is not None:  # groups from elsewhere may come without the order that kernels read
            arranged = parts.members
            if arranged is None or arranged.place is None:
                arranged = sorted_members(parts.labels, parts.count, k, parts=True, backend=name)
            assert arranged is not None
            by_part = (arranged.order, arranged.first, arranged.place, arranged.largest)
        settings = (scale, top, *blocks, 1 if parts is None else parts.count, MASSES.index(mass), detach_mass, name)
        given = (mask.keys, labels, members.order, members.first, *by_part, shares, counts)
        # the gradient of means goes on to their members where theirs is made
        out, lse, *_ = _near_and_far(q, c if counts is None else c.detach(), k, v, *given, *settings)
        return Attended(out, lse)
    joined()
    tangent = mass == "tangent"
    found = coarse(c, k, v, mask, scale, top=top, tangent=tangent, parts=parts, shares=shares, blocks=blocks)
    return fine(q, c, k, v, labels, found, scale, mass, detach_mass, per=blocks[0])


def fine(
    q: Tensor, c: Tensor, k: Tensor, v: Tensor, labels: Tensor, found: Coarse, scale: float, mass: str, detach: bool,
    per: int = 0,
) -> Attended:  # fmt: skip
    """Each query over its cluster's near keys, and over each far part as one."""
    level, at = found.lse, found.near_at  # (b h c p) (b h c t)
    bias = torch.where(at < 0, NEVER, 0.0).to(level.dtype)
    if mass == "cluster":
        # Far weighs against near for each query as it does for the centroid (eqs. 9-11): that share is one number for
        # the cluster, and mixes the answers of near and far.
        level = level.squeeze(-1)
        odds = torch.where(level == NEVER, NEVER, level - torch.where(found.near_lse == NEVER, 0.0, found.near_lse))
        share = odds.sigmoid()
        out, lse = _fine(q, k, v, c[..., None, :][..., :0, :], found.out[..., :0, :].to(v.dtype), bias, None, None, at,
                         labels, scale, per)  # fmt: skip
        kept = broadcast(1 - (share.detach() if detach else share), labels)
        out = kept.unsqueeze(-1) * out + broadcast(share.unsqueeze(-1) * found.out.squeeze(3), labels)
        return Attended(out, lse + broadcast(F.softplus(odds), labels))
    # The keys of a far part act as one: with their mean as the key, its logit is the tangent of their log-sum-exp at
    # the centroid; with a zero key, that log-sum-exp itself.
    key = found.mean_key.to(k.dtype) if mass == "tangent" else torch.zeros_like(c).unsqueeze(3)
    level = level - (wide(key) @ wide(c).unsqueeze(-1)).squeeze(-1) * scale
    out, lse = _fine(
        q, k, v, key, found.out.to(v.dtype), torch.cat([bias, level], 3),
        found.slope, None if found.slope is None else c, at, labels, scale, per,
    )  # fmt: skip
    return Attended(out, lse)
