"""Gradients of fine: once with the queries standing still, for theirs, and once with each tile of a cluster's keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._jit import jit, precision, registers, rows, tl
from .._launch import launch
from ..coarse import backward_kernels as coarse_backward
from ..coarse.arrange import arrange, put_back
from ..coarse.kernels import Far
from ..coarse.slope import added
from ..members.kernels import turns
from .kernels import CLUSTER, LOG2E, TANGENT, FineSettings, _gather, _odds, _part_keys, _row, _slope, _softplus, tiling


@jit
def fine_bwd_q_kernel(
    Q, K, V, C, NEAR, FAR, MEAN, FAR_LSE, NEAR_LSE, SLOPE, ORDER, TURNS, OUT, LSE, FAR_SHARE, DY, D_LSE,
    DQ, DELTA, MOVED, D_C,
    n, turns, c, t, parts, d, e, heads, group, scale, natural_scale,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm, syb, syh, syn,
    MASS: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_D_LSE: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Also DELTA = dy . out (less d_lse), MOVED = dy . scale (q - c) M, and D_C (lead turns d): each turn's share of
    what the slope's foot at the centroid takes."""
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
        dq, moved = tl.zeros((BS, BD), tl.float32), tl.zeros((BS,), tl.float32)
        if HAS_SLOPE:
            slope = _slope(SLOPE, lead, which, c, 0, dims, values, d, e).to(q.dtype)
            apart = (q.to(tl.float32) - _row(C, cluster, dims, d)[None, :]).to(q.dtype)
            turned = tl.dot(apart, slope, input_precision=PRECISION) * natural_scale
            moved = tl.sum(turned * dy.to(tl.float32), 1)
            share = tl.where(seen, tl.load(FAR_SHARE + row), 0.0)
            foot = tl.dot(dy, tl.trans(slope), input_precision=PRECISION) * (share * natural_scale)[:, None]
            dq += foot
            tl.store(D_C + (lead * turns + tl.program_id(0)) * d + dims, -tl.sum(foot, 0), mask=dims < d)
            tl.store(MOVED + row, moved, mask=real)
        tl.store(DELTA + row, delta, mask=real)
        base2 = lse * 1.4426950408889634
        to_near, near_share = delta, 1.0
        if MASS == 2:
            odds = _odds(tl.load(FAR_LSE + cluster), tl.load(NEAR_LSE + cluster))
            near_share = 1 - tl.sigmoid(odds)
            base2 -= _softplus(odds) * 1.4426950408889634
            to_near -= tl.sigmoid(odds) * tl.sum(dy.to(tl.float32) * _row(FAR, cluster, values, e)[None, :], 1)
        if listed:
            for first in range(0, t, BT):
                slot = first + tl.arange(0, BT)
                near = tl.load(NEAR + cluster * t + slot, mask=slot < t, other=-1)
                k = _gather(K, batch * skb + (head // group) * skh, near, skm, dims, d, near >= 0)
                v = _gather(V, batch * svb + (head // group) * svh, near, svm, values, e, near >= 0)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
                dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION) * near_share
                inside = seen[:, None] & (near >= 0)[None, :]
                ds = tl.where(inside, tl.exp2(s - base2[:, None]), 0.0) * (dp - to_near[:, None])
                dq += tl.dot((ds * natural_scale).to(k.dtype), k, input_precision=PRECISION)
            if MASS == 1:
                for first in range(0, parts, BP):
                    k, v, bias = _part_keys(
                        MEAN, FAR, FAR_LSE, C, lead, which, c, first + tl.arange(0, BP), parts, dims, values, d, e,
                        scale, q.dtype, MASS,
                    )  # fmt: skip
                    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias[None, :]
                    dp = tl.dot(dy, tl.trans(v.to(dy.dtype)), input_precision=PRECISION) + moved[:, None]
                    ds = tl.where(seen[:, None], tl.exp2(s - base2[:, None]), 0.0) * (dp - delta[:, None])
                    dq += tl.dot((ds * natural_scale).to(k.dtype), k, input_precision=PRECISION)
        tl.store(
            DQ + row[:, None] * d + dims[None, :], dq.to(DQ.dtype.element_ty),
            mask=real[:, None] & (dims < d)[None, :],
        )  # fmt: skip


@jit
def fine_bwd_near_kernel(
    Q, K, V, NEAR, FAR, FAR_LSE, NEAR_LSE, ORDER, FIRST, LSE, DY, DELTA, DK, DV,
    n, c, t, d, e, heads, group, scale, natural_scale, every,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm, syb, syh, syn,
    MASS: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a cluster's near keys past all of its queries."""
    which, lead = tl.program_id(0) // every, tl.program_id(1).to(tl.int64)
    begin = tl.load(FIRST + lead * (c + 2) + which)
    end = tl.load(FIRST + lead * (c + 2) + which + 1)
    batch, head = lead // heads, lead % heads
    dims, values, cluster = tl.arange(0, BD), tl.arange(0, BE), lead * c + which
    slot = (tl.program_id(0) % every) * BT + tl.arange(0, BT)
    near = tl.load(NEAR + cluster * t + slot, mask=slot < t, other=-1)
    k = _gather(K, batch * skb + (head // group) * skh, near, skm, dims, d, near >= 0)
    v = _gather(V, batch * svb + (head // group) * svh, near, svm, values, e, near >= 0)
    odds, far_share = 0.0, 0.0
    if MASS == 2:
        odds = _odds(tl.load(FAR_LSE + cluster), tl.load(NEAR_LSE + cluster))
        far_share = tl.sigmoid(odds)
    dk, dv = tl.zeros((BT, BD), tl.float32), tl.zeros((BT, BE), tl.float32)
    for turn in range(begin, end, BS):
        place = turn + tl.arange(0, BS)
        real = place < end
        query = tl.load(ORDER + lead * n + tl.minimum(place, end - 1))
        row = lead * n + query
        q = _gather(Q, batch * sqb + head * sqh, query, sqn, dims, d, real)
        dy = _gather(DY, batch * syb + head * syh, query, syn, values, e, real)
        lse = tl.load(LSE + row)
        seen = real & (lse != float("-inf"))
        base2 = tl.where(seen, lse, 0.0) * 1.4426950408889634
        delta = tl.load(DELTA + row)
        if MASS == 2:
            base2 -= _softplus(odds) * 1.4426950408889634
            delta -= far_share * tl.sum(dy.to(tl.float32) * _row(FAR, cluster, values, e)[None, :], 1)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        p = tl.where(seen[:, None] & (near >= 0)[None, :], tl.exp2(s - base2[:, None]), 0.0)
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION) * (1 - far_share)
        ds = p * (dp - delta[:, None])
        dv += tl.dot(tl.trans((p * (1 - far_share)).to(dy.dtype)), dy, input_precision=PRECISION)
        dk += tl.dot(tl.trans((ds * natural_scale).to(q.dtype)), q, input_precision=PRECISION)
    to, there = (cluster * t + slot)[:, None], (slot < t)[:, None]
    tl.store(DK + to * d + dims[None, :], dk.to(DK.dtype.element_ty), mask=there & (dims < d)[None, :])
    tl.store(DV + to * e + values[None, :], dv.to(DV.dtype.element_ty), mask=there & (values < e)[None, :])


@jit
def fine_bwd_part_kernel(
    Q, C, FAR, MEAN, FAR_LSE, NEAR_LSE, ORDER, FIRST, LSE, DY, DELTA, D_LSE, MOVED, D_MEAN, D_FAR, D_FAR_LSE,
    n, c, parts, d, e, heads, scale, natural_scale, every, sqb, sqh, sqn, syb, syh, syn,
    MASS: tl.constexpr, DETACH: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_D_LSE: tl.constexpr,
    BS: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a cluster's far parts past all of its queries."""
    which, lead = tl.program_id(0) // every, tl.program_id(1).to(tl.int64)
    begin = tl.load(FIRST + lead * (c + 2) + which)
    end = tl.load(FIRST + lead * (c + 2) + which + 1)
    batch, head = lead // heads, lead % heads
    dims, values, cluster = tl.arange(0, BD), tl.arange(0, BE), lead * c + which
    part = (tl.program_id(0) % every) * BP + tl.arange(0, BP)
    k, v, bias = _part_keys(
        MEAN, FAR, FAR_LSE, C, lead, which, c, part, parts, dims, values, d, e, scale, Q.dtype.element_ty, MASS
    )
    far_share = 0.0
    if MASS == 2:
        far_share = tl.sigmoid(_odds(tl.load(FAR_LSE + cluster), tl.load(NEAR_LSE + cluster)))
    d_mean, d_far = tl.zeros((BP, BD), tl.float32), tl.zeros((BP, BE), tl.float32)
    d_level = tl.zeros((BP,), tl.float32)
    centroid = _row(C, cluster, dims, d)
    for turn in range(begin, end, BS):
        place = turn + tl.arange(0, BS)
        real = place < end
        query = tl.load(ORDER + lead * n + tl.minimum(place, end - 1))
        row = lead * n + query
        q = _gather(Q, batch * sqb + head * sqh, query, sqn, dims, d, real)
        dy = _gather(DY, batch * syb + head * syh, query, syn, values, e, real)
        lse = tl.load(LSE + row)
        seen = real & (lse != float("-inf"))
        delta = tl.load(DELTA + row)
        if MASS == 2:  # one far part, mixed in by its share
            d_lse = tl.zeros((BS,), tl.float32)
            if HAS_D_LSE:
                d_lse = tl.where(seen, tl.load(D_LSE + row), 0.0)
            to_far = tl.sum(dy.to(tl.float32) * _row(FAR, cluster, values, e)[None, :], 1)
            gap = far_share * ((1 - far_share) * to_far + d_lse)
            if not DETACH:
                gap -= far_share * (delta + d_lse - far_share * to_far)  # (1 - share) dy . the near answer
            weight = tl.where(seen, far_share, 0.0)
            d_level += tl.where(part == 0, tl.sum(tl.where(seen, gap, 0.0), 0), 0.0)
            mixed = tl.sum(weight[:, None] * dy.to(tl.float32), 0)
            d_far += tl.where((part == 0)[:, None], mixed[None, :], 0.0)
        else:
            s = tl.zeros((BS, BP), tl.float32) + bias[None, :]
            if MASS == 1:
                s += tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            base2 = tl.where(seen, lse, 0.0) * 1.4426950408889634
            p = tl.where(seen[:, None], tl.exp2(s - base2[:, None]), 0.0)
            dp = tl.dot(dy, tl.trans(v.to(dy.dtype)), input_precision=PRECISION)
            if HAS_SLOPE:
                dp += tl.load(MOVED + row)[:, None]
            ds = p * (dp - delta[:, None])
            d_level += tl.sum(ds, 0)
            d_far += tl.dot(tl.trans(p.to(dy.dtype)), dy, input_precision=PRECISION)
            if MASS == 1:
                apart = tl.where(real[:, None], q.to(tl.float32) - centroid[None, :], 0.0).to(q.dtype)
                d_mean += tl.dot(tl.trans((ds * natural_scale).to(q.dtype)), apart, input_precision=PRECISION)
    to, there = (lead * parts + part) * c + which, part < parts
    tl.store(D_FAR + to[:, None] * e + values[None, :], d_far, mask=there[:, None] & (values < e)[None, :])
    tl.store(D_FAR_LSE + to, d_level, mask=there)
    if MASS == 1:
        tl.store(D_MEAN + to[:, None] * d + dims[None, :], d_mean, mask=there[:, None] & (dims < d)[None, :])


@jit
def d_slope_kernel(
    Q, C, LABELS, DY, FAR_SHARE, LSE, PART, n, c, d, e, heads, scale, splits, stretch, sqb, sqh, sqn, syb, syh, syn,
    BS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PART (lead splits d e): sum over queries of (q - c)^T scale w_far dy."""
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


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, c: Tensor, k: Tensor, v: Tensor, keep: Tensor | None,
    labels: Tensor, order: Tensor, first: Tensor, part_order: Tensor | None, part_first: Tensor | None,
    pi: Tensor | None, out: Tensor, lse: Tensor, share: Tensor, found: Far, settings: FineSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    keys, reach, mass = arrange(k, v, keep, part_order, part_first), settings.reach, settings.mass
    plain, q, k, v, dy = c.to(k.dtype).contiguous(), rows(q), keys.k, keys.v, rows(d_out.to(v.dtype))
    (b, h, n, d), (clusters, top), e, parts = q.shape, found.near_at.shape[1:], v.shape[3], reach.parts
    lead, slope = b * h, pi is not None

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    shape = tiling(q, v, clusters, top, parts, 64 if q.element_size() == 2 else 32)
    taken = turns(first, n, shape["BS"])
    dq = new(b, h, n, d, dtype=q.dtype)
    delta, moved = new(2, lead, n)
    foot = new(lead, taken.most, d if slope else 0)
    flags: dict[str, Any] = {"MASS": mass, "HAS_SLOPE": slope, "HAS_D_LSE": d_lse is not None}
    sizes = (n, taken.most, clusters, top, parts, d, e, h, h // k.shape[1], reach.scale * LOG2E, reach.scale)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dy.stride()[:3])
    theirs = (q, k, v, plain, found.near_at, found.out, found.mean_key, found.lse, found.near_lse)
    d_lse = delta if d_lse is None else d_lse.float().contiguous()
    launch(
        fine_bwd_q_kernel, (taken.most, lead),
        (*theirs, found.slope, order, taken.listed, out.contiguous(), lse, share, dy, d_lse, dq, delta, moved, foot),
        (*sizes, *strides), num_stages=1, **registers(k, v), **flags, **shape,
    )  # fmt: skip
    near_dk, near_dv = new(lead, clusters, top, d, dtype=k.dtype), new(lead, clusters, top, e, dtype=v.dtype)
    d_far, d_level = new(lead, parts, clusters, e), new(lead, parts, clusters)
    d_mean = new(lead, parts, clusters, d if mass == TANGENT else 0)
    warps = {name: shape[name] for name in ("BS", "BD", "BE", "PRECISION", "num_warps")}
    far_numbers, near_numbers = (clusters, parts, d, e, h), (clusters, top, d, e, h, h // k.shape[1])
    if top:
        every = -(-top // shape["BT"])
        launch(
            fine_bwd_near_kernel, (clusters * every, lead),
            (q, k, v, found.near_at, found.out, found.lse, found.near_lse, order, first, lse, dy, delta, near_dk,
            near_dv), (n, *near_numbers, reach.scale * LOG2E, reach.scale, every, *strides),
            MASS=mass, BT=shape["BT"], num_stages=3, **warps,
        )  # fmt: skip
    every = -(-parts // shape["BP"])
    launch(
        fine_bwd_part_kernel, (clusters * every, lead),
        (q, plain, found.out, found.mean_key, found.lse, found.near_lse, order, first, lse, dy, delta, d_lse, moved,
        d_mean, d_far, d_level), (n, *far_numbers, reach.scale * LOG2E, reach.scale, every,
        *q.stride()[:3], *dy.stride()[:3]), DETACH=settings.detach, BP=shape["BP"], num_stages=1, **flags, **warps,
    )  # fmt: skip
    d_slope = None
    if slope:
        programs = max(1, min(-(-264 // lead), -(-n // 128)))
        stretch = -(-n // (programs * 64)) * 64
        part = new(lead, programs, d, e)
        launch(
            d_slope_kernel, (programs, lead), (q, plain, labels.contiguous(), dy, share, lse, part),
            (n, clusters, d, e, h, reach.scale, programs, stretch, *q.stride()[:3], *dy.stride()[:3]),
            BS=64 if (shape["BD"] + shape["BE"]) * q.element_size() <= 512 else 32, BD=shape["BD"], BE=shape["BE"],
            PRECISION=precision(q), num_warps=8 if shape["BD"] > 64 else 4,
        )  # fmt: skip
        d_slope = added(part)
    feet = coarse_backward.Feet(foot, taken.first) if slope else None
    given = coarse_backward.Given(d_far, d_mean, d_level, None, d_slope, feet)
    dc, dk, dv = coarse_backward.backward(given, c, keys, pi, found, reach, foot=mass == TANGENT, odds=mass == CLUSTER)
    return dq, dc, *put_back(dk, dv, keys, found.near_at, near_dk, near_dv)
