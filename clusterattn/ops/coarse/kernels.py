"""Centroid attention on tensor cores, split over the keys and joined by log-sum-exp in a fixed order.

Near keys come from near.py, as a bit mask that the pass over the keys leaves out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import jit, power, precision, rows, tl, why_no_kernels
from .._jit import triton as _triton
from .near import _limit, select
from .reference import Reach

LOG2E = 1.4426950408889634


@jit
def _near(BITS, lead, row, rows, words, first, key, BM: tl.constexpr):
    """Which of a tile's keys are near for which rows: a word of 32 bits per row and half tile."""
    low = tl.load(BITS + (lead * rows + row) * words + first // 32, mask=row < rows, other=0)
    high = tl.load(
        BITS + (lead * rows + row) * words + first // 32 + 1, mask=(row < rows) & (first // 32 + 1 < words), other=0
    )
    word = tl.where((key - first < 32)[None, :], low[:, None], high[:, None])
    return ((word >> (key % 32)[None, :]) & 1) != 0


@jit
def coarse_fwd_kernel(
    C, K, V, KEEP, BITS, OUT, MEAN, STATS, rows, m, d, e, heads, group, scale, per, first, step, words, splits, stretch,
    skb, skh, skm, svb, svh, svm,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, TANGENT: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split, lead = tl.program_id(0), tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    row, dims, values = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BD), tl.arange(0, BE)
    c = tl.load(
        C + (lead * rows + row[:, None]) * d + dims[None, :],
        mask=(row[:, None] < rows) & (dims[None, :] < d),
        other=0.0,
    )
    limit = _limit(row, m, per, first, step)
    highest, total = tl.full((BC,), float("-inf"), tl.float32), tl.zeros((BC,), tl.float32)
    near_highest, near_total = tl.full((BC,), float("-inf"), tl.float32), tl.zeros((BC,), tl.float32)
    out = tl.zeros((BC, BE), tl.float32)
    mean = tl.zeros((BC, BD), tl.float32)
    for start in range(split * stretch, min((split + 1) * stretch, tl.max(tl.where(row < rows, limit, 0))), BM):
        key = start + tl.arange(0, BM)
        there = key[:, None] < m
        k = tl.load(
            K + batch * skb + head * skh + key.to(tl.int64)[:, None] * skm + dims[None, :],
            mask=there & (dims[None, :] < d),
            other=0.0,
        )
        s = tl.dot(c, tl.trans(k), input_precision=PRECISION) * scale
        seen = key[None, :] < limit[:, None]
        if HAS_KEEP:
            seen = seen & (tl.load(KEEP + batch * m + key, mask=key < m, other=0) != 0)[None, :]
        s = tl.where(seen, s, float("-inf"))
        if HAS_NEAR:
            near = _near(BITS, lead, row, rows, words, start, key, BM)
            if not TANGENT:
                theirs = tl.where(near, s, float("-inf"))
                new = tl.maximum(near_highest, tl.max(theirs, 1))
                level = tl.where(new == float("-inf"), 0.0, new)
                near_total = near_total * tl.exp2(near_highest - level) + tl.sum(tl.exp2(theirs - level[:, None]), 1)
                near_highest = new
            s = tl.where(near, float("-inf"), s)
        new = tl.maximum(highest, tl.max(s, 1))
        level = tl.where(new == float("-inf"), 0.0, new)
        p, fade = tl.exp2(s - level[:, None]), tl.exp2(highest - level)
        highest, total = new, total * fade + tl.sum(p, 1)
        v = tl.load(
            V + batch * svb + head * svh + key.to(tl.int64)[:, None] * svm + values[None, :],
            mask=there & (values[None, :] < e),
            other=0.0,
        )
        out = out * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        if TANGENT:
            mean = mean * fade[:, None] + tl.dot(p.to(k.dtype), k, input_precision=PRECISION)
    place = (lead * splits + split) * rows + row
    tl.store(OUT + place[:, None] * e + values[None, :], out, mask=(row[:, None] < rows) & (values[None, :] < e))
    if TANGENT:
        tl.store(MEAN + place[:, None] * d + dims[None, :], mean, mask=(row[:, None] < rows) & (dims[None, :] < d))
    tl.store(STATS + place * 4, highest, mask=row < rows)
    tl.store(STATS + place * 4 + 1, total, mask=row < rows)
    tl.store(STATS + place * 4 + 2, near_highest, mask=row < rows)
    tl.store(STATS + place * 4 + 3, near_total, mask=row < rows)


@jit
def join_kernel(
    PART, MEANS, STATS, OUT, MEAN, LSE, NEAR_LSE, rows, d, e, splits,
    TANGENT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The splits of one row into one answer."""
    lead, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BC + tl.arange(0, BC)
    dims, values, here = tl.arange(0, BD), tl.arange(0, BE), row < rows
    highest, near_highest = tl.full((BC,), float("-inf"), tl.float32), tl.full((BC,), float("-inf"), tl.float32)
    for split in range(splits):
        place = ((lead * splits + split) * rows + row) * 4
        highest = tl.maximum(highest, tl.load(STATS + place, mask=here, other=float("-inf")))
        near_highest = tl.maximum(near_highest, tl.load(STATS + place + 2, mask=here, other=float("-inf")))
    level, near_level = (
        tl.where(highest == float("-inf"), 0.0, highest),
        tl.where(near_highest == float("-inf"), 0.0, near_highest),
    )
    total, near_total = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    out, mean = tl.zeros((BC, BE), tl.float32), tl.zeros((BC, BD), tl.float32)
    for split in range(splits):
        place = (lead * splits + split) * rows + row
        weight = tl.exp2(tl.load(STATS + place * 4, mask=here, other=float("-inf")) - level)
        total += weight * tl.load(STATS + place * 4 + 1, mask=here, other=0.0)
        near = tl.exp2(tl.load(STATS + place * 4 + 2, mask=here, other=float("-inf")) - near_level)
        near_total += near * tl.load(STATS + place * 4 + 3, mask=here, other=0.0)
        out += weight[:, None] * tl.load(
            PART + place[:, None] * e + values[None, :], mask=here[:, None] & (values[None, :] < e), other=0.0
        )
        if TANGENT:
            mean += weight[:, None] * tl.load(
                MEANS + place[:, None] * d + dims[None, :], mask=here[:, None] & (dims[None, :] < d), other=0.0
            )
    some = tl.where(total > 0, total, 1.0)
    place = lead * rows + row
    tl.store(
        OUT + place[:, None] * e + values[None, :], out / some[:, None], mask=here[:, None] & (values[None, :] < e)
    )
    if TANGENT:
        tl.store(
            MEAN + place[:, None] * d + dims[None, :], mean / some[:, None], mask=here[:, None] & (dims[None, :] < d)
        )
    natural = 0.6931471805599453
    tl.store(LSE + place, tl.where(total > 0, (tl.log2(some) + level) * natural, float("-inf")), mask=here)
    near_some = tl.where(near_total > 0, near_total, 1.0)
    tl.store(
        NEAR_LSE + place,
        tl.where(near_total > 0, (tl.log2(near_some) + near_level) * natural, float("-inf")),
        mask=here,
    )


@jit
def _weights(
    c, k, v, dy, dm, delta, lse, near_lse, d_near, near, seen, scale,
    HAS_NEAR: tl.constexpr, TANGENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Far weights and the gradient of the scores for a tile: (rows keys) twice. All logs in base 2."""
    s = tl.dot(c, tl.trans(k), input_precision=PRECISION) * scale
    far = seen
    if HAS_NEAR:
        far = seen & (~near)
    p = tl.where(far, tl.exp2(s - lse[:, None]), 0.0)
    dp = tl.dot(dy.to(v.dtype), tl.trans(v), input_precision=PRECISION)
    if TANGENT:
        dp += tl.dot(dm.to(k.dtype), tl.trans(k), input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    if HAS_NEAR and not TANGENT:
        ds += tl.where(seen & near, tl.exp2(s - near_lse[:, None]), 0.0) * d_near[:, None]
    return p, ds


@jit
def coarse_bwd_kv_kernel(
    C, K, V, KEEP, BITS, DY, DM, DELTA, LSE, NEAR_LSE, D_NEAR, DK, DV,
    rows, m, d, e, heads, group, scale, natural_scale, per, first, step, words, skb, skh, skm, svb, svh, svm,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, TANGENT: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    start, place = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64)
    kv_heads = heads // group
    batch, kv_head = place // kv_heads, place % kv_heads
    key, dims, values = start + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    at = key.to(tl.int64)[:, None]
    k = tl.load(
        K + batch * skb + kv_head * skh + at * skm + dims[None, :], mask=(at < m) & (dims[None, :] < d), other=0.0
    )
    v = tl.load(
        V + batch * svb + kv_head * svh + at * svm + values[None, :], mask=(at < m) & (values[None, :] < e), other=0.0
    )
    keep = key < m
    if HAS_KEEP:
        keep = keep & (tl.load(KEEP + batch * m + key, mask=key < m, other=0) != 0)
    dk, dv = tl.zeros((BM, BD), tl.float32), tl.zeros((BM, BE), tl.float32)
    tiles = (rows + BC - 1) // BC
    for turn in range(group * tiles):
        lead = batch * heads + kv_head * group + turn // tiles
        row = (turn % tiles) * BC + tl.arange(0, BC)
        here = row < rows
        mine = lead * rows + row
        c = tl.load(C + mine[:, None] * d + dims[None, :], mask=here[:, None] & (dims[None, :] < d), other=0.0)
        dy = tl.load(DY + mine[:, None] * e + values[None, :], mask=here[:, None] & (values[None, :] < e), other=0.0)
        dm = c
        if TANGENT:
            dm = tl.load(DM + mine[:, None] * d + dims[None, :], mask=here[:, None] & (dims[None, :] < d), other=0.0)
        lse, delta = tl.load(LSE + mine, mask=here, other=0.0), tl.load(DELTA + mine, mask=here, other=0.0)
        near_lse, d_near = tl.load(NEAR_LSE + mine, mask=here, other=0.0), tl.load(D_NEAR + mine, mask=here, other=0.0)
        seen = keep[None, :] & (key[None, :] < _limit(row, m, per, first, step)[:, None]) & here[:, None]
        near = seen
        if HAS_NEAR:
            near = _near(BITS, lead, row, rows, words, start, key, BM)
        p, ds = _weights(c, k, v, dy, dm, delta, lse, near_lse, d_near, near, seen, scale, HAS_NEAR, TANGENT, PRECISION)
        dv += tl.dot(tl.trans(p.to(v.dtype)), dy.to(v.dtype), input_precision=PRECISION)
        dk += tl.dot(tl.trans((ds * natural_scale).to(k.dtype)), c, input_precision=PRECISION)
        if TANGENT:
            dk += tl.dot(tl.trans(p.to(k.dtype)), dm.to(k.dtype), input_precision=PRECISION)
    out = (place * m + key)[:, None]
    tl.store(DK + out * d + dims[None, :], dk.to(DK.dtype.element_ty), mask=(at < m) & (dims[None, :] < d))
    tl.store(DV + out * e + values[None, :], dv.to(DV.dtype.element_ty), mask=(at < m) & (values[None, :] < e))


@jit
def coarse_bwd_c_kernel(
    C, K, V, KEEP, BITS, DY, DM, DELTA, LSE, NEAR_LSE, D_NEAR, DC,
    rows, m, d, e, heads, group, scale, natural_scale, per, first, step, words, splits, stretch,
    skb, skh, skm, svb, svh, svm,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, TANGENT: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split, lead = tl.program_id(0), tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    row, dims, values = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BD), tl.arange(0, BE)
    here, mine = row < rows, lead * rows + row
    c = tl.load(C + mine[:, None] * d + dims[None, :], mask=here[:, None] & (dims[None, :] < d), other=0.0)
    dy = tl.load(DY + mine[:, None] * e + values[None, :], mask=here[:, None] & (values[None, :] < e), other=0.0)
    dm = c
    if TANGENT:
        dm = tl.load(DM + mine[:, None] * d + dims[None, :], mask=here[:, None] & (dims[None, :] < d), other=0.0)
    lse, delta = tl.load(LSE + mine, mask=here, other=0.0), tl.load(DELTA + mine, mask=here, other=0.0)
    near_lse, d_near = tl.load(NEAR_LSE + mine, mask=here, other=0.0), tl.load(D_NEAR + mine, mask=here, other=0.0)
    limit = _limit(row, m, per, first, step)
    dc = tl.zeros((BC, BD), tl.float32)
    for start in range(split * stretch, min((split + 1) * stretch, tl.max(tl.where(here, limit, 0))), BM):
        key = start + tl.arange(0, BM)
        at = key.to(tl.int64)[:, None]
        k = tl.load(
            K + batch * skb + head * skh + at * skm + dims[None, :], mask=(at < m) & (dims[None, :] < d), other=0.0
        )
        v = tl.load(
            V + batch * svb + head * svh + at * svm + values[None, :], mask=(at < m) & (values[None, :] < e), other=0.0
        )
        seen = (key[None, :] < limit[:, None]) & here[:, None]
        if HAS_KEEP:
            seen = seen & (tl.load(KEEP + batch * m + key, mask=key < m, other=0) != 0)[None, :]
        near = seen
        if HAS_NEAR:
            near = _near(BITS, lead, row, rows, words, start, key, BM)
        p, ds = _weights(c, k, v, dy, dm, delta, lse, near_lse, d_near, near, seen, scale, HAS_NEAR, TANGENT, PRECISION)
        dc += tl.dot((ds * natural_scale).to(k.dtype), k, input_precision=PRECISION)
    place = (lead * splits + split) * rows + row
    tl.store(DC + place[:, None] * d + dims[None, :], dc, mask=here[:, None] & (dims[None, :] < d))


def why_not(c: Tensor, k: Tensor, v: Tensor) -> str | None:
    if v.shape[-1] > 256:
        return f"kernels hold value dimensions up to 256, this one is {v.shape[-1]}"
    if 0 in c.shape or 0 in k.shape or 0 in v.shape:
        return "there is nothing to launch for an empty tensor"
    return why_no_kernels(k)


def _tiles(k: Tensor, v: Tensor, clusters: int) -> dict[str, int]:
    """Tile sizes by the bytes of a key with its value: what shared memory has room for."""
    d, e = power(k.shape[-1]), power(v.shape[-1])
    room = (d + e) * k.element_size()
    return {"BC": min(128 if room <= 256 else 64 if room <= 512 else 32, power(clusters)), "BM": 64, "BD": d, "BE": e}


def _splits(m: int, programs: int, tile: int) -> tuple[int, int]:
    """How often the keys are cut, and the keys per cut: enough programs for a large chip, whole tiles each."""
    splits = max(1, min(_triton.cdiv(m, 4 * tile), _triton.cdiv(264, programs)))
    stretch = _triton.cdiv(_triton.cdiv(m, splits), tile) * tile
    return _triton.cdiv(m, stretch), stretch


def forward(
    c: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, how: Reach
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As reference.forward, and the bit mask of the near keys, which backward wants again."""
    (b, h, clusters, d), (hk, m, e) = c.shape, v.shape[1:]
    c, k, v, top = c.to(k.dtype).contiguous(), rows(k), rows(v), min(how.top, m)
    keep = None if keep is None else keep.contiguous()
    lead, words = b * h, _triton.cdiv(m, 32)
    near_at = torch.empty(lead, clusters, 0, dtype=torch.int64, device=c.device)
    bits = torch.empty(lead, clusters, 0, dtype=torch.int32, device=c.device)
    if top:
        near_at, bits = select(c, k, keep, how, top)
    tile = _tiles(k, v, clusters)
    row_tiles = _triton.cdiv(clusters, tile["BC"])
    splits, stretch = _splits(m, lead * row_tiles, tile["BM"])

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=c.device)

    part, stats = new(lead, splits, clusters, e), new(lead, splits, clusters, 4)
    means = new(lead, splits, clusters, d if how.tangent else 0)
    coarse_fwd_kernel[(splits, row_tiles, lead)](
        c, k, v, keep if keep is not None else c, bits, part, means, stats,
        clusters, m, d, e, h, h // hk, how.scale * LOG2E, how.per, how.first, how.step, words, splits, stretch,
        *k.stride()[:3], *v.stride()[:3],
        HAS_KEEP=keep is not None, HAS_NEAR=top > 0, TANGENT=how.tangent,
        PRECISION=precision(k), num_warps=8 if tile["BC"] == 128 else 4, **tile,
    )  # fmt: skip
    out, mean = new(b, h, clusters, e), new(b, h, clusters, d if how.tangent else 0)
    lse, near_lse = new(b, h, clusters), new(b, h, clusters)
    join_kernel[(_triton.cdiv(clusters, 4), lead)](
        part, means, stats, out, mean, lse, near_lse, clusters, d, e, splits,
        TANGENT=how.tangent, BC=4, BD=tile["BD"], BE=tile["BE"], num_warps=4,
    )  # fmt: skip
    return out, mean, lse, near_lse, near_at.view(b, h, clusters, top), bits.view(b, h, clusters, -1)


def backward(
    d_out: Tensor, d_mean: Tensor, d_lse: Tensor, d_near: Tensor, c: Tensor, k: Tensor, v: Tensor, keep: Tensor | None,
    out: Tensor, mean_key: Tensor, lse: Tensor, near_lse: Tensor, bits: Tensor, how: Reach,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (b, h, clusters, d), (hk, m, e) = c.shape, v.shape[1:]
    c, k, v = c.to(k.dtype).contiguous(), rows(k), rows(v)
    keep = None if keep is None else keep.contiguous()
    delta = (d_out * out).sum(-1) - d_lse
    if how.tangent:
        delta = delta + (d_mean * mean_key).sum(-1)
    lse, near_lse = (torch.where(x == float("-inf"), 0.0, x * LOG2E) for x in (lse, near_lse))
    dy, dm, d_near = d_out.contiguous(), d_mean.contiguous(), d_near.contiguous()
    lead, words = b * h, _triton.cdiv(m, 32)
    tile = _tiles(k, v, clusters)
    tile["BC"] = min(64, tile["BC"])
    shared = (c, k, v, keep if keep is not None else c, bits, dy, dm, delta, lse, near_lse, d_near)
    sizes = (clusters, m, d, e, h, h // hk, how.scale * LOG2E, how.scale, how.per, how.first, how.step, words)
    strides = (*k.stride()[:3], *v.stride()[:3])
    flags = {
        "HAS_KEEP": keep is not None,
        "HAS_NEAR": how.top > 0,
        "TANGENT": how.tangent,
        "PRECISION": precision(k),
        "num_warps": 4,
    }
    dk, dv = (
        torch.empty(b, hk, m, d, dtype=k.dtype, device=k.device),
        torch.empty(b, hk, m, e, dtype=v.dtype, device=k.device),
    )
    coarse_bwd_kv_kernel[(_triton.cdiv(m, tile["BM"]), b * hk)](*shared, dk, dv, *sizes, *strides, **flags, **tile)
    row_tiles = _triton.cdiv(clusters, tile["BC"])
    splits, stretch = _splits(m, lead * row_tiles, tile["BM"])
    dc = torch.empty(lead, splits, clusters, d, dtype=torch.float32, device=c.device)
    coarse_bwd_c_kernel[(splits, row_tiles, lead)](*shared, dc, *sizes, splits, stretch, *strides, **flags, **tile)
    return dc.sum(1).view(b, h, clusters, d), dk, dv
