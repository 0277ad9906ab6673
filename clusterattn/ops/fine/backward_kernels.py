"""Gradients of fine: once with the queries standing still, for theirs, and once with each tile of a cluster's keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._types import Members
from .._jit import in_turn, jit, narrow, precision, registers, rows, tl
from .._launch import launch, stacked
from ..coarse import backward_kernels as coarse_backward
from ..coarse.arrange import Arranged, add_near, arrange, in_order
from ..coarse.kernels import Far
from ..coarse.reference import SLOPE_CLUSTERS, Reach
from ..coarse.slope import added, levels, middle, own
from ..coarse.slope_backward import Pulls, Rows, pulled, pulls, strip
from ..members.kernels import turns
from ..rows.kernels import add_shares
from .kernels import CLUSTER, LOG2E, TANGENT, FineSettings, _gather, _odds, _part_keys, _row, _slope, _softplus, tiling


@jit
def fine_bwd_q_kernel(
    Q, K, V, C, NEAR, FAR, MEAN, FAR_LSE, NEAR_LSE, SLOPE, ORDER, TURNS, OUT, LSE, FAR_SHARE, DY, D_LSE,
    DQ, BASE2, DELTA, FAR_DELTA, D_C,
    n, turns, c, t, parts, d, e, heads, group, scale, natural_scale,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm, syb, syh, syn,
    MASS: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_D_LSE: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Also D_C (lead turns d): each turn's share of what the slope's foot at the centroid takes; and in the order of
    the turns BASE2, log2 of the sum of a query's weights (inf for one that sees nothing); DELTA = dy . out less d_lse
    (MASS 2: of near attention); FAR_DELTA, that less dy . scale (q - c) M."""
    in_turn()
    lead = tl.program_id(1).to(tl.int64)
    turn = TURNS + (lead * turns + tl.program_id(0)) * 3
    which, begin, end = tl.load(turn), tl.load(turn + 1), tl.load(turn + 2)
    batch, head = lead // heads, lead % heads
    dims, values = tl.arange(0, BD), tl.arange(0, BE)
    listed = which < c
    which = tl.minimum(which, c - 1)
    cluster = lead * c + which
    if begin < end:
        place = begin + tl.arange(0, BS)
        real = place < end
        query = tl.load(ORDER + lead * n + tl.minimum(place, end - 1))
        row = lead * n + query
        q = _gather(Q, batch * sqb + head * sqh, query, sqn, dims, d, real)
        dy = _gather(DY, batch * syb + head * syh, query, syn, values, e, real)
        out = _gather(OUT, 0, row, e, values, e, real).to(tl.float32)
        lse = tl.load(LSE + row)
        seen = real & (lse != float("-inf"))
        delta = tl.sum(out * dy.to(tl.float32), 1)
        if HAS_D_LSE:
            delta -= tl.where(seen, tl.load(D_LSE + row), 0.0)
        lse = tl.where(seen, lse, 0.0)
        dq, far_delta = tl.zeros((BS, BD), tl.float32), delta
        if HAS_SLOPE:
            slope = _slope(SLOPE, lead, which, c, 0, dims, values, d, e).to(q.dtype)
            apart = (q.to(tl.float32) - _row(C, cluster, dims, d)[None, :]).to(q.dtype)
            turned = tl.dot(apart, slope, input_precision=PRECISION) * natural_scale
            far_delta = delta - tl.sum(turned * dy.to(tl.float32), 1)
            share = tl.where(seen, tl.load(FAR_SHARE + row), 0.0)
            foot = tl.dot(dy, tl.trans(slope), input_precision=PRECISION) * (share * natural_scale)[:, None]
            dq += foot
            tl.store(D_C + (lead * turns + tl.program_id(0)) * d + dims, -tl.sum(foot, 0), mask=dims < d)
        base2 = lse * 1.4426950408889634
        near_share = 1.0
        if MASS == 2:
            odds = _odds(tl.load(FAR_LSE + cluster), tl.load(NEAR_LSE + cluster))
            near_share = 1 - tl.sigmoid(odds)
            base2 -= _softplus(odds) * 1.4426950408889634
            delta -= tl.sigmoid(odds) * tl.sum(dy.to(tl.float32) * _row(FAR, cluster, values, e)[None, :], 1)
        base2 = tl.where(seen, base2, float("inf"))
        tl.store(BASE2 + lead * n + place, base2, mask=real)
        tl.store(DELTA + lead * n + place, delta, mask=real)
        if MASS != 2:
            tl.store(FAR_DELTA + lead * n + place, far_delta, mask=real)
        if listed:
            for first in range(0, t, BT):
                slot = first + tl.arange(0, BT)
                near = tl.load(NEAR + cluster * t + slot, mask=slot < t, other=-1)
                k = _gather(K, batch * skb + (head // group) * skh, near, skm, dims, d, near >= 0)
                v = _gather(V, batch * svb + (head // group) * svh, near, svm, values, e, near >= 0)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
                dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION) * near_share
                ds = tl.where((near >= 0)[None, :], tl.exp2(s - base2[:, None]), 0.0) * (dp - delta[:, None])
                dq += tl.dot((ds * natural_scale).to(k.dtype), k, input_precision=PRECISION)
            if MASS == 1:
                for first in range(0, parts, BP):
                    k, v, bias = _part_keys(
                        MEAN, FAR, FAR_LSE, C, lead, which, c, first + tl.arange(0, BP), parts, dims, values, d, e,
                        scale, q.dtype, MASS,
                    )  # fmt: skip
                    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias[None, :]
                    dp = tl.dot(dy, tl.trans(v.to(dy.dtype)), input_precision=PRECISION)
                    ds = tl.exp2(s - base2[:, None]) * (dp - far_delta[:, None])
                    dq += tl.dot((ds * natural_scale).to(k.dtype), k, input_precision=PRECISION)
        tl.store(
            DQ + row[:, None] * d + dims[None, :], dq.to(DQ.dtype.element_ty),
            mask=real[:, None] & (dims < d)[None, :],
        )  # fmt: skip


@jit
def fine_bwd_near_kernel(
    Q, K, V, NEAR, FAR_LSE, NEAR_LSE, ORDER, FIRST, DY, BASE2, DELTA, DK, DV,
    n, c, t, d, e, heads, group, scale, natural_scale, every,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm, syb, syh, syn,
    MASS: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a cluster's near keys past all of its queries."""
    in_turn()
    which, lead = tl.program_id(0) // every, tl.program_id(1).to(tl.int64)
    begin = tl.load(FIRST + lead * (c + 2) + which)
    end = tl.load(FIRST + lead * (c + 2) + which + 1)
    batch, head = lead // heads, lead % heads
    dims, values, cluster = tl.arange(0, BD), tl.arange(0, BE), lead * c + which
    slot = (tl.program_id(0) % every) * BT + tl.arange(0, BT)
    near = tl.load(NEAR + cluster * t + slot, mask=slot < t, other=-1)
    k = _gather(K, batch * skb + (head // group) * skh, near, skm, dims, d, near >= 0)
    v = _gather(V, batch * svb + (head // group) * svh, near, svm, values, e, near >= 0)
    near_share = 1.0
    if MASS == 2:
        near_share = 1 - tl.sigmoid(_odds(tl.load(FAR_LSE + cluster), tl.load(NEAR_LSE + cluster)))
    dk, dv = tl.zeros((BT, BD), tl.float32), tl.zeros((BT, BE), tl.float32)
    for turn in range(begin, end, BS):
        place = turn + tl.arange(0, BS)
        real = place < end
        query = tl.load(ORDER + lead * n + tl.minimum(place, end - 1))
        q = _gather(Q, batch * sqb + head * sqh, query, sqn, dims, d, real)
        dy = _gather(DY, batch * syb + head * syh, query, syn, values, e, real)
        base2 = tl.load(BASE2 + lead * n + place, mask=real, other=float("inf"))
        delta = tl.load(DELTA + lead * n + place, mask=real, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        p = tl.where((near >= 0)[None, :], tl.exp2(s - base2[:, None]), 0.0)
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION) * near_share
        ds = p * (dp - delta[:, None])
        dv += tl.dot(tl.trans((p * near_share).to(dy.dtype)), dy, input_precision=PRECISION)
        dk += tl.dot(tl.trans((ds * natural_scale).to(q.dtype)), q, input_precision=PRECISION)
    to, there = (cluster * t + slot)[:, None], (slot < t)[:, None]
    tl.store(DK + to * d + dims[None, :], dk.to(DK.dtype.element_ty), mask=there & (dims < d)[None, :])
    tl.store(DV + to * e + values[None, :], dv.to(DV.dtype.element_ty), mask=there & (values < e)[None, :])


@jit
def fine_bwd_part_kernel(
    Q, C, FAR, MEAN, FAR_LSE, ORDER, FIRST, DY, BASE2, FAR_DELTA, D_MEAN, D_FAR, D_FAR_LSE,
    K, V, PART_FIRST, LEVEL, D_SLOPE, DELTA, FAR_BASE2, AMOUNT, ACROSS,
    n, m, c, parts, d, e, heads, group, few, scale, natural_scale, every,
    sqb, sqh, sqn, syb, syh, syn, skb, skh, skm, svb, svh, svm,
    MASS: tl.constexpr, HAS_SLOPE: tl.constexpr, OWN: tl.constexpr, BV: tl.constexpr,
    BS: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a cluster's far parts past all of its queries. Of the tangent all that coarse's backward wants of
    these rows (see Rows): gradients in the keys' dtype, with what the slope adds to them. ACROSS: see pulls; OWN, BV:
    see pull_kernel. FIRST: of the clusters; PART_FIRST: of the keys' parts."""
    in_turn()
    which, lead = tl.program_id(0) // every, tl.program_id(1).to(tl.int64)
    begin = tl.load(FIRST + lead * (c + 2) + which)
    end = tl.load(FIRST + lead * (c + 2) + which + 1)
    batch, head = lead // heads, lead % heads
    dims, values, cluster = tl.arange(0, BD), tl.arange(0, BE), lead * c + which
    part = (tl.program_id(0) % every) * BP + tl.arange(0, BP)
    to, there = (lead * parts + part) * c + which, part < parts
    k, v, bias = _part_keys(
        MEAN, FAR, FAR_LSE, C, lead, which, c, part, parts, dims, values, d, e, scale, Q.dtype.element_ty, MASS
    )
    v = v.to(DY.dtype.element_ty)
    d_mean, d_far = tl.zeros((BP, BD), tl.float32), tl.zeros((BP, BE), tl.float32)
    d_scores = tl.zeros((BS, BP), tl.float32)  # added up over the queries when all have passed
    centroid = _row(C, cluster, dims, d)
    for turn in range(begin, end, BS):
        place = turn + tl.arange(0, BS)
        real = place < end
        query = tl.load(ORDER + lead * n + tl.minimum(place, end - 1))
        q = _gather(Q, batch * sqb + head * sqh, query, sqn, dims, d, real)
        dy = _gather(DY, batch * syb + head * syh, query, syn, values, e, real)
        base2 = tl.load(BASE2 + lead * n + place, mask=real, other=float("inf"))
        delta = tl.load(FAR_DELTA + lead * n + place, mask=real, other=0.0)
        s = tl.zeros((BS, BP), tl.float32) + bias[None, :]
        if MASS == 1:
            s += tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        p = tl.exp2(s - base2[:, None])
        ds = p * (tl.dot(dy, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        d_scores += ds
        d_far += tl.dot(tl.trans(p.to(dy.dtype)), dy, input_precision=PRECISION)
        if MASS == 1:  # what is read beyond the end has no weight
            apart = (q.to(tl.float32) - centroid[None, :]).to(q.dtype)
            d_mean += tl.dot(tl.trans(ds.to(q.dtype)), apart, input_precision=PRECISION)
    d_level = tl.sum(d_scores, 0)
    if MASS == 1:
        d_mean *= natural_scale
        lse2 = tl.load(FAR_LSE + to, mask=there, other=float("-inf")) * 1.4426950408889634
        delta = -d_level
        if HAS_SLOPE:
            amount = tl.exp2(lse2 - tl.load(LEVEL + cluster))
            if which < few:
                kv_head, near_it = head // group, part
                if OWN:
                    of_parts = PART_FIRST + (batch * (heads // group) + kv_head) * (parts + 2)
                    near_it = middle(of_parts, tl.minimum(part, parts - 1), m)
                d_far, d_mean, across = pulled(
                    MEAN, FAR, K + batch * skb + kv_head * skh, V + batch * svb + kv_head * svh,
                    MEAN + lead * parts * c * d, FAR + lead * parts * c * e, D_SLOPE + lead * d * e,
                    to, near_it, there, k, v, amount, d_far, d_mean, d, e, skm, svm, OWN, BV, BD, BE, PRECISION,
                )  # fmt: skip
                delta += amount * across
                tl.store(ACROSS + (lead * parts + part) * few + which, amount * across, mask=there)
            tl.store(AMOUNT + to, amount, mask=there)
        delta += tl.sum(d_far * v.to(tl.float32), 1) + tl.sum(d_mean * k.to(tl.float32), 1)
        tl.store(DELTA + to, delta, mask=there)
        tl.store(FAR_BASE2 + to, tl.where(lse2 == float("-inf"), 0.0, lse2), mask=there)
        tl.store(
            D_MEAN + to[:, None] * d + dims[None, :], d_mean.to(D_MEAN.dtype.element_ty),
            mask=there[:, None] & (dims < d)[None, :],
        )  # fmt: skip
    tl.store(
        D_FAR + to[:, None] * e + values[None, :], d_far.to(D_FAR.dtype.element_ty),
        mask=there[:, None] & (values < e)[None, :],
    )  # fmt: skip
    tl.store(D_FAR_LSE + to, d_level, mask=there)


@jit
def fine_bwd_mixed_kernel(
    FAR, FAR_LSE, NEAR_LSE, ORDER, FIRST, DY, BASE2, DELTA, D_LSE, D_FAR, D_FAR_LSE, n, c, e, heads, syb, syh, syn,
    DETACH: tl.constexpr, HAS_D_LSE: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """MASS 2: one far part, mixed in by its share; all queries of a cluster."""
    in_turn()
    which, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin = tl.load(FIRST + lead * (c + 2) + which)
    end = tl.load(FIRST + lead * (c + 2) + which + 1)
    batch, head = lead // heads, lead % heads
    values, cluster = tl.arange(0, BE), lead * c + which
    far_share = tl.sigmoid(_odds(tl.load(FAR_LSE + cluster), tl.load(NEAR_LSE + cluster)))
    far, d_far, d_level = _row(FAR, cluster, values, e), tl.zeros((BE,), tl.float32), 0.0
    for turn in range(begin, end, BS):
        place = turn + tl.arange(0, BS)
        query = tl.load(ORDER + lead * n + tl.minimum(place, end - 1))
        seen = tl.load(BASE2 + lead * n + place, mask=place < end, other=float("inf")) != float("inf")
        dy = _gather(DY, batch * syb + head * syh, query, syn, values, e, seen).to(tl.float32)
        d_lse = tl.zeros((BS,), tl.float32)
        if HAS_D_LSE:
            d_lse = tl.load(D_LSE + lead * n + query, mask=seen, other=0.0)
        gap = far_share * ((1 - far_share) * tl.sum(dy * far[None, :], 1) + d_lse)
        if not DETACH:  # (1 - share) dy . the near answer
            gap -= far_share * (tl.load(DELTA + lead * n + place, mask=seen, other=0.0) + d_lse)
        d_level += tl.sum(gap, 0)
        d_far += far_share * tl.sum(dy, 0)
    tl.store(D_FAR + cluster * e + values, d_far, mask=values < e)
    tl.store(D_FAR_LSE + cluster, d_level)


@jit
def d_slope_kernel(
    Q, C, LABELS, DY, FAR_SHARE, LSE, PART, n, c, d, e, heads, scale, splits, stretch, sqb, sqh, sqn, syb, syh, syn,
    BS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PART (lead splits d e): sum over queries of (q - c)^T scale w_far dy."""
    in_turn()
    split, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lead // heads, lead % heads
    dims, values = tl.arange(0, BD), tl.arange(0, BE)
    total = tl.zeros((BD, BE), tl.float32)
    for start in range(split * stretch, tl.minimum((split + 1) * stretch, n), BS):
        query = start + tl.arange(0, BS)
        here = query < n
        label = tl.load(LABELS + lead * n + query, mask=here, other=-1)
        here = here & (label >= 0)
        share = tl.load(FAR_SHARE + lead * n + query, mask=here, other=0.0)
        share = tl.where(here & (tl.load(LSE + lead * n + query, mask=here, other=0.0) != float("-inf")), share, 0.0)
        q = _gather(Q, batch * sqb + head * sqh, query, sqn, dims, d, here).to(tl.float32)
        centroid = _gather(C, lead * c * d, label, d, dims, d, here).to(tl.float32)
        dy = _gather(DY, batch * syb + head * syh, query, syn, values, e, here)
        pulled = (dy.to(tl.float32) * (share * scale)[:, None]).to(dy.dtype)
        total += tl.dot(tl.trans((q - centroid).to(Q.dtype.element_ty)), pulled, input_precision=PRECISION)
    to = (lead * splits + split) * d
    tl.store(PART + (to + dims[:, None]) * e + values[None, :], total, mask=(dims < d)[:, None] & (values < e)[None, :])


def _d_slope(
    q: Tensor, c: Tensor, labels: Tensor, dy: Tensor, share: Tensor, lse: Tensor, scale: float, shape: dict[str, Any]
) -> Tensor:
    """The gradient of the slope (b*h d e); c and the answer in the queries' dtype."""
    (b, h, n, d), clusters, e = q.shape, c.shape[2], dy.shape[3]
    lead = b * h
    programs = max(1, min(-(-528 // lead), -(-n // 128)))
    stretch = -(-n // (programs * 64)) * 64
    part = torch.empty(lead, programs, d, e, dtype=torch.float32, device=q.device)
    launch(
        d_slope_kernel, (programs, lead), (q, c, labels.contiguous(), dy, share, lse, part),
        (n, clusters, d, e, h, scale, programs, stretch, *q.stride()[:3], *dy.stride()[:3]),
        BS=64 if (shape["BD"] + shape["BE"]) * q.element_size() <= 512 else 32, BD=shape["BD"], BE=shape["BE"],
        PRECISION=precision(q), num_warps=8 if shape["BD"] > 64 else 4,
    )  # fmt: skip
    return added(part, q.dtype)


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, c: Tensor, k: Tensor, v: Tensor, keep: Tensor | None,
    labels: Tensor, order: Tensor, first: Tensor, parts: Members | None, pi: Tensor | None, counts: Tensor | None,
    out: Tensor, lse: Tensor, share: Tensor, found: Far, settings: FineSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    came, reach, mass = in_order(k, v, keep, parts), settings.reach, settings.mass
    plain, q, k, v, dy = c.to(k.dtype).contiguous(), rows(q), came.k, came.v, rows(d_out.to(v.dtype))
    (b, h, n, d), (clusters, top), e, slope = q.shape, found.near_at.shape[1:], v.shape[3], pi is not None
    lead, group, scales = b * h, h // k.shape[1], (reach.scale * LOG2E, reach.scale)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    shape = tiling(q, v, clusters, top, reach.parts, 64 if q.element_size() == 2 else 32)
    taken = turns(first, n, shape["BS"])
    dq = new(b, h, n, d, dtype=q.dtype)
    base2, delta, far_delta = stacked(3, lead * n, q.device)
    foot = new(lead, taken.most, d if slope else 0)
    of_lse = delta if d_lse is None else d_lse.float().contiguous()
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dy.stride()[:3])
    launch(
        fine_bwd_q_kernel, (taken.most, lead),
        (q, k, v, plain, found.near_at, found.out, found.mean_key, found.lse, found.near_lse, found.slope, order,
        taken.listed, out.contiguous(), lse, share, dy, of_lse, dq, base2, delta, far_delta, foot),
        (n, taken.most, clusters, top, reach.parts, d, e, h, group, *scales, *strides),
        MASS=mass, HAS_SLOPE=slope, HAS_D_LSE=d_lse is not None, num_stages=1, **registers(k, v), **shape,
    )  # fmt: skip
    near_dk, near_dv = new(lead, clusters, top, d, dtype=k.dtype), new(lead, clusters, top, e, dtype=v.dtype)
    if top:
        every = -(-top // shape["BT"])
        launch(
            fine_bwd_near_kernel, (clusters * every, lead),
            (q, k, v, found.near_at, found.lse, found.near_lse, order, first, dy, base2, delta, near_dk, near_dv),
            (n, clusters, top, d, e, h, group, *scales, every, *strides), MASS=mass, num_stages=3,
            **_without(shape, "BP"),
        )  # fmt: skip
    d_slope = _d_slope(q, plain, labels, dy, share, lse, reach.scale, shape) if slope else None
    keys = arrange(came)
    queries = _Queries(q, dy, order, first, base2, delta, far_delta, None if d_lse is None else of_lse)
    if mass == TANGENT:
        row, d_level, pulls = _tangent(queries, plain, keys, pi, d_slope, found, reach, shape)
        feet = coarse_backward.Feet(foot, taken.first) if slope else None
        dc, dk, dv = coarse_backward.backward(row, c, keys, found, reach, foot=d_level, feet=feet, pulls=pulls)
    else:
        given = _levels(queries, plain, keys, found, settings, shape)
        row = coarse_backward.prepared(given, keys, found, reach, odds=mass == CLUSTER)
        dc, dk, dv = coarse_backward.backward(row, c, keys, found, reach)
    if counts is not None:
        add_shares(dq, dc, labels, counts)
    return dq, dc, *add_near(dk, dv, found.near_at, near_dk, near_dv)


@dataclass(frozen=True)
class _Queries:
    """What the gradients of far parts are made of."""

    q: Tensor
    dy: Tensor
    order: Tensor
    first: Tensor
    base2: Tensor  # see fine_bwd_q_kernel
    delta: Tensor
    far_delta: Tensor
    d_lse: Tensor | None


def _tangent(
    queries: _Queries, c: Tensor, keys: Arranged, pi: Tensor | None, d_slope: Tensor | None, found: Far, reach: Reach,
    shape: dict[str, Any],
) -> tuple[Rows, Tensor, Pulls | None]:  # fmt: skip
    """What coarse's backward wants of rows and keys, and the gradients of the rows' lse."""
    q, dy, k, v = queries.q, queries.dy, keys.k, keys.v
    (h, n, d), (lead, parts, clusters), e = q.shape[1:], found.lse.shape, v.shape[3]
    few, every = min(clusters, SLOPE_CLUSTERS), -(-parts // shape["BP"])

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    count = lead * parts * clusters
    dy_rows, dm_rows = new(count, e, dtype=v.dtype), new(count, d, dtype=k.dtype)
    d_level, delta, base2 = stacked(3, count, q.device)
    amount, across, level = (delta,) * 3
    if pi is not None:
        amount, across, level = new(count), new(lead, parts, few), levels(found.lse, pi)
    launch(
        fine_bwd_part_kernel, (clusters * every, lead),
        (q, c, found.out, found.mean_key, found.lse, queries.order, queries.first, dy, queries.base2, queries.far_delta,
        dm_rows, dy_rows, d_level, k, v, keys.first_or(q), level, delta if d_slope is None else d_slope, delta, base2,
        amount, across),
        (n, k.shape[2], clusters, parts, d, e, h, h // k.shape[1], few, reach.scale * LOG2E, reach.scale, every,
        *q.stride()[:3], *dy.stride()[:3], *k.stride()[:3], *v.stride()[:3]), MASS=TANGENT, HAS_SLOPE=pi is not None,
        OWN=own(keys, parts), BV=strip(shape["BD"], shape["BE"], q.element_size()), num_stages=3 if narrow(k, v) else 1,
        **_of_parts(shape),
    )  # fmt: skip
    row = Rows(dy_rows, dm_rows, delta, base2, base2, base2, amount)
    if pi is None or d_slope is None:
        return row, d_level, None
    return row, d_level, pulls(d_slope, c, keys, pi, level, across, row, found, reach)


def _levels(
    queries: _Queries, c: Tensor, keys: Arranged, found: Far, settings: FineSettings, shape: dict[str, Any]
) -> coarse_backward.Given:  # fmt: skip
    """The gradients of what the centroids found, where their far parts are levels: softmax, or mixed in by a share."""
    q, dy, k, v, reach = queries.q, queries.dy, keys.k, keys.v, settings.reach
    (h, n, d), (lead, parts, clusters), e = q.shape[1:], found.lse.shape, v.shape[3]
    d_level, d_far, none = (
        torch.empty(lead, parts, clusters, *rest, dtype=torch.float32, device=q.device) for rest in ((), (e,), (0,))
    )
    if settings.mass == CLUSTER:
        launch(
            fine_bwd_mixed_kernel, (clusters, lead),
            (found.out, found.lse, found.near_lse, queries.order, queries.first, dy, queries.base2, queries.delta,
            queries.delta if queries.d_lse is None else queries.d_lse, d_far, d_level),
            (n, clusters, e, h, *dy.stride()[:3]), DETACH=settings.detach, HAS_D_LSE=queries.d_lse is not None,
            BS=shape["BS"], BE=shape["BE"], num_warps=shape["num_warps"], num_stages=1,
        )  # fmt: skip
    else:
        every = -(-parts // shape["BP"])
        launch(
            fine_bwd_part_kernel, (clusters * every, lead),
            (q, c, found.out, found.mean_key, found.lse, queries.order, queries.first, dy, queries.base2,
            queries.far_delta, none, d_far, d_level, k, v, *(queries.delta,) * 7),
            (n, k.shape[2], clusters, parts, d, e, h, h // k.shape[1], 0, reach.scale * LOG2E, reach.scale, every,
            *q.stride()[:3], *dy.stride()[:3], *k.stride()[:3], *v.stride()[:3]), MASS=settings.mass,
            HAS_SLOPE=False, OWN=False, BV=0, num_stages=3 if narrow(k, v) else 1, **_of_parts(shape),
        )  # fmt: skip
    return coarse_backward.Given(d_far, none, d_level, None)


def _without(shape: dict[str, Any], tile: str) -> dict[str, Any]:
    return {name: size for name, size in shape.items() if name != tile}


def _of_parts(shape: dict[str, Any]) -> dict[str, Any]:
    """However few queries a tile has: it is as many parts wide as there are, and holds their gradients."""
    return _without(shape, "BT") | {"num_warps": max(4, shape["num_warps"])}
