"""Queries sorted by cluster walk past the few near keys of their cluster, which stay in registers; the far keys are one
more key. Backward writes the gradients of a cluster's near keys cluster by cluster, for coarse's backward to add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..._types import Parts
from .._jit import jit, power, precision, rows, tl, why_no_kernels
from ..coarse import kernels as coarse
from ..coarse.reference import Reach
from ..members.kernels import tiles

LOG2E = 1.4426950408889634
SOFTMAX, TANGENT, CLUSTER = 0, 1, 2  # how the far part weighs, see Improved
MASSES = {"softmax": SOFTMAX, "tangent": TANGENT, "cluster": CLUSTER}


@jit
def _gather(X, base, at, step, dims, width, real):
    """Rows of a sequence by position."""
    return tl.load(
        X + base + at.to(tl.int64)[:, None] * step + dims[None, :],
        mask=real[:, None] & (dims < width)[None, :], other=0.0,
    )  # fmt: skip


@jit
def _row(X, cluster, dims, width):
    return tl.load(X + cluster * width + dims, mask=dims < width, other=0.0).to(tl.float32)


@jit
def _far_logit(q, C, MEAN, far_lse, cluster, dims, d, scale, MASS: tl.constexpr, BS: tl.constexpr):
    """The far keys' logit for each query, in base 2: their log-sum-exp at the centroid, or its tangent there."""
    far = tl.zeros((BS,), tl.float32) + far_lse * 1.4426950408889634
    if MASS == 1:
        apart = q.to(tl.float32) - _row(C, cluster, dims, d)[None, :]
        far += tl.sum(apart * _row(MEAN, cluster, dims, d)[None, :], 1) * scale
    return far


@jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1 + tl.exp(-tl.abs(x)))


@jit
def _odds(far_lse, near_lse):
    """The far part's log-odds against the near one, for a cluster: -inf where nothing is far."""
    return tl.where(far_lse == float("-inf"), far_lse, far_lse - tl.where(near_lse == float("-inf"), 0.0, near_lse))


@jit
def fine_fwd_kernel(
    Q, K, V, C, NEAR, FAR, MEAN, FAR_LSE, NEAR_LSE, ORDER, FIRST, OUT, LSE,
    n, c, t, d, e, heads, group, scale, splits, sqb, sqh, sqn, skb, skh, skm, svb, svh, svm,
    MASS: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    which, split, lead = tl.program_id(0) // splits, tl.program_id(0) % splits, tl.program_id(1).to(tl.int64)
    begin = tl.load(FIRST + lead * (c + 2) + which) + split * BS
    end = tl.load(FIRST + lead * (c + 2) + which + 1)
    if begin < end:
        batch, head = lead // heads, lead % heads
        dims, values, slot = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BT)
        cluster = lead * c + tl.minimum(which, c - 1)  # the last "cluster" are those without one: they see nothing
        near = tl.load(NEAR + cluster * t + slot, mask=(slot < t) & (which < c), other=-1)
        k = _gather(K, batch * skb + (head // group) * skh, near, skm, dims, d, near >= 0)
        v = _gather(V, batch * svb + (head // group) * svh, near, svm, values, e, near >= 0)
        far_lse, near_lse = tl.load(FAR_LSE + cluster), tl.load(NEAR_LSE + cluster)
        far_lse = tl.where(which < c, far_lse, float("-inf"))
        far_value = _row(FAR, cluster, values, e)
        for turn in range(begin, end, splits * BS):
            place = turn + tl.arange(0, BS)
            real = place < end
            query = tl.load(ORDER + lead * n + tl.minimum(place, end - 1))
            q = _gather(Q, batch * sqb + head * sqh, query, sqn, dims, d, real)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            s = tl.where((near >= 0)[None, :], s, float("-inf"))
            highest = tl.max(s, 1)
            far = highest
            if MASS != 2:
                far = _far_logit(q, C, MEAN, far_lse, cluster, dims, d, scale, MASS, BS)
                highest = tl.maximum(highest, far)
            level = tl.where(highest == float("-inf"), 0.0, highest)
            p = tl.exp2(s - level[:, None])
            total = tl.sum(p, 1)
            out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            if MASS != 2:
                weight = tl.exp2(far - level)
                total += weight
                out += weight[:, None] * far_value[None, :]
            safe = tl.where(total > 0, total, 1.0)
            out = out / safe[:, None]
            lse = tl.where(total > 0, (tl.log2(safe) + level) * 0.6931471805599453, float("-inf"))
            if MASS == 2:
                odds = _odds(far_lse, near_lse)
                share = tl.where(total > 0, tl.sigmoid(odds), 0.0)
                out = out * (1 - share)[:, None] + share[:, None] * far_value[None, :]
                lse += _softplus(odds)
            row = lead * n + query
            tl.store(
                OUT + row[:, None] * e + values[None, :], out.to(OUT.dtype.element_ty),
                mask=real[:, None] & (values < e)[None, :],
            )  # fmt: skip
            tl.store(LSE + row, lse, mask=real)


@jit
def fine_bwd_kernel(
    Q, K, V, C, NEAR, FAR, MEAN, FAR_LSE, NEAR_LSE, ORDER, FIRST, OUT, LSE, DY, D_LSE,
    DQ, DK, DV, D_FAR, D_MEAN, D_FAR_LSE,
    n, c, t, d, e, heads, group, scale, natural_scale, splits,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm, syb, syh, syn,
    MASS: tl.constexpr, DETACH: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    which, split, lead = tl.program_id(0) // splits, tl.program_id(0) % splits, tl.program_id(1).to(tl.int64)
    batch, head = lead // heads, lead % heads
    dims, values, slot = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BT)
    begin = tl.load(FIRST + lead * (c + 2) + which) + split * BS
    end = tl.load(FIRST + lead * (c + 2) + which + 1)
    cluster = lead * c + tl.minimum(which, c - 1)
    near = tl.load(NEAR + cluster * t + slot, mask=(slot < t) & (which < c), other=-1)
    k = _gather(K, batch * skb + (head // group) * skh, near, skm, dims, d, near >= 0)
    v = _gather(V, batch * svb + (head // group) * svh, near, svm, values, e, near >= 0)
    far_lse, near_lse = tl.load(FAR_LSE + cluster), tl.load(NEAR_LSE + cluster)
    far_value = _row(FAR, cluster, values, e)
    dk, dv = tl.zeros((BT, BD), tl.float32), tl.zeros((BT, BE), tl.float32)
    d_mean, d_far = tl.zeros((BD,), tl.float32), tl.zeros((BE,), tl.float32)
    d_level = tl.zeros((BS,), tl.float32)
    for turn in range(begin, end, splits * BS):
        place = turn + tl.arange(0, BS)
        real = place < end
        query = tl.load(ORDER + lead * n + tl.minimum(place, end - 1))
        row = lead * n + query
        q = _gather(Q, batch * sqb + head * sqh, query, sqn, dims, d, real)
        dy = _gather(DY, batch * syb + head * syh, query, syn, values, e, real)
        out = _gather(OUT, 0, row, e, values, e, real).to(tl.float32)
        lse = tl.load(LSE + row)
        seen = real & (lse != float("-inf"))
        d_lse = tl.where(seen, tl.load(D_LSE + row), 0.0)
        delta = tl.sum(out * dy.to(tl.float32), 1)
        to_far = tl.sum(dy.to(tl.float32) * far_value[None, :], 1)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        inside = seen[:, None] & (near >= 0)[None, :]
        lse = tl.where(seen, lse, 0.0)
        if MASS == 2:
            odds = _odds(far_lse, near_lse)
            share = tl.sigmoid(odds)
            p = tl.where(inside, tl.exp2(s - (lse - _softplus(odds))[:, None] * 1.4426950408889634), 0.0)  # sums to one
            to_near = delta - share * to_far  # (1 - share) dy . the near answer
            ds = p * ((1 - share) * dp - (to_near - d_lse)[:, None])
            p, weight = p * (1 - share), tl.where(seen, share, 0.0)
            gap = share * ((1 - share) * to_far + d_lse)
            if not DETACH:
                gap -= share * to_near
            d_level += tl.where(seen, gap, 0.0)
        else:
            base2 = lse * 1.4426950408889634
            p = tl.where(inside, tl.exp2(s - base2[:, None]), 0.0)
            ds = p * (dp - (delta - d_lse)[:, None])
            far = _far_logit(q, C, MEAN, far_lse, cluster, dims, d, scale, MASS, BS)
            weight = tl.where(seen, tl.exp2(far - base2), 0.0)
            gap = weight * (to_far - delta + d_lse)
            d_level += gap
        dq = tl.dot((ds * natural_scale).to(k.dtype), k, input_precision=PRECISION)
        if MASS == 1:
            gap = gap * natural_scale
            dq += gap[:, None] * _row(MEAN, cluster, dims, d)[None, :]
            apart = q.to(tl.float32) - _row(C, cluster, dims, d)[None, :]
            d_mean += tl.sum(gap[:, None] * apart, 0)
        d_far += tl.sum(weight[:, None] * dy.to(tl.float32), 0)
        dv += tl.dot(tl.trans(p.to(dy.dtype)), dy, input_precision=PRECISION)
        dk += tl.dot(tl.trans((ds * natural_scale).to(q.dtype)), q, input_precision=PRECISION)
        tl.store(
            DQ + row[:, None] * d + dims[None, :], dq.to(DQ.dtype.element_ty),
            mask=real[:, None] & (dims < d)[None, :],
        )  # fmt: skip
    if which < c:
        mine = cluster * splits + split
        part = (mine * t + slot)[:, None]
        real = (slot < t)[:, None]
        tl.store(DK + part * d + dims[None, :], dk.to(DK.dtype.element_ty), mask=real & (dims < d)[None, :])
        tl.store(DV + part * e + values[None, :], dv.to(DV.dtype.element_ty), mask=real & (values < e)[None, :])
        tl.store(D_FAR + mine * e + values, d_far, mask=values < e)
        tl.store(D_FAR_LSE + mine, tl.sum(d_level, 0))
        if MASS == 1:
            tl.store(D_MEAN + mine * d + dims, d_mean, mask=dims < d)


def why_not(
    q: Tensor, k: Tensor, v: Tensor, clusters: int, top: int, parts: Parts | None, shares: Tensor | None
) -> str | None:
    if parts is not None or shares is not None:
        return "there is no kernel for parts and slope yet"
    if v.shape[-1] > 256:
        return f"kernels hold value dimensions up to 256, this one is {v.shape[-1]}"
    if 0 in q.shape or 0 in k.shape or 0 in v.shape or not clusters:
        return "there is nothing to launch for an empty tensor"
    if min(top, k.shape[2]) > 128:
        return f"kernels hold up to 128 near keys of a cluster, these are {min(top, k.shape[2])}"
    if clusters > 8190:
        return f"kernels count up to 8190 clusters, there are {clusters}"
    return why_no_kernels(q)


@dataclass(frozen=True)
class Found:
    """What forward leaves for backward, besides its inputs and its answer."""

    far: Tensor
    mean_key: Tensor
    far_lse: Tensor
    near_lse: Tensor
    near_at: Tensor
    bits: Tensor


def _sizes(
    q: Tensor, v: Tensor, clusters: int, top: int, most: int, stages: int
) -> tuple[tuple[int, ...], dict[str, object], int]:
    (h, n, d), (hk, e) = q.shape[1:], (v.shape[1], v.shape[3])
    tile, splits = tiles(n, clusters, most)
    size = tile * (power(d) + power(e)) * q.element_size()
    shape: dict[str, object] = {
        "BS": tile, "BT": power(top), "BD": power(d), "BE": power(e), "PRECISION": precision(q),
        "num_warps": 1 if size <= 4096 else 2 if size <= 8192 else 4 if size <= 32768 else 8,
        "num_stages": stages,
    }  # fmt: skip
    return (n, clusters, top, d, e, h, h // hk), shape, splits


def forward(
    q: Tensor,
    c: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    order: Tensor,
    first: Tensor,
    reach: Reach,
    mass: int,
) -> tuple[Tensor, Tensor, Found]:
    found = Found(*coarse.forward(c, k, v, keep, reach))
    q, c, k, v = rows(q), c.to(k.dtype).contiguous(), rows(k), rows(v)
    (b, h, n, _), (clusters, top) = q.shape, found.near_at.shape[2:]
    sizes, shape, splits = _sizes(q, v, clusters, top, 64, stages=2)
    out = torch.empty(b, h, n, v.shape[3], dtype=v.dtype, device=q.device)
    lse = torch.empty(b, h, n, dtype=torch.float32, device=q.device)
    fine_fwd_kernel[((clusters + 1) * splits, b * h)](
        q, k, v, c, found.near_at, found.far, found.mean_key, found.far_lse, found.near_lse, order, first, out, lse,
        *sizes, reach.scale * LOG2E, splits, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], MASS=mass, **shape,
    )  # fmt: skip
    return out, lse, found


def backward(
    d_out: Tensor, d_lse: Tensor, q: Tensor, c: Tensor, k: Tensor, v: Tensor, keep: Tensor | None,
    order: Tensor, first: Tensor, out: Tensor, lse: Tensor, found: Found, reach: Reach, mass: int, detach: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    plain = c.to(k.dtype).contiguous()
    q, k, v, dy = rows(q), rows(k), rows(v), rows(d_out.to(v.dtype))
    (b, h, n, d), (clusters, top), e = q.shape, found.near_at.shape[2:], v.shape[3]
    sizes, shape, splits = _sizes(q, v, clusters, top, 64 if q.element_size() == 2 else 32, stages=1)
    splits = min(splits, 2)  # each split writes gradients of its own for the near keys

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(b * h, clusters, splits, *shape, dtype=dtype, device=q.device)

    dq = torch.empty(b, h, n, d, dtype=q.dtype, device=q.device)
    dk, dv, d_far, d_level = new(top, d, dtype=k.dtype), new(top, e, dtype=v.dtype), new(e), new()
    d_mean = new(d if mass == TANGENT else 0)
    fine_bwd_kernel[((clusters + 1) * splits, b * h)](
        q, k, v, plain, found.near_at, found.far, found.mean_key, found.far_lse, found.near_lse, order, first,
        out.contiguous(), lse, dy, d_lse.contiguous(), dq, dk, dv, d_far, d_mean, d_level,
        *sizes, reach.scale * LOG2E, reach.scale, splits,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dy.stride()[:3],
        MASS=mass, DETACH=detach, **shape,
    )  # fmt: skip
    dc, dk, dv = coarse.backward(
        d_far, d_mean, d_level, None, c, k, v, keep, found.far, found.mean_key, found.far_lse, found.near_lse,
        found.bits, reach, splits=splits, near=(found.near_at, dk, dv), odds=mass == CLUSTER,
    )  # fmt: skip
    return dq, dc, dk, dv
