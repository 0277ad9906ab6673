"""Centroid attention on tensor cores, split over the keys and joined by log-sum-exp in a fixed order.

Near keys come from near.py, as a bit mask that the pass over the keys leaves out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import jit, power, precision, rows, tl, why_no_kernels
from .._jit import triton as _triton
from .near import _limit, add_near, select
from .reference import Reach

LOG2E = 1.4426950408889634


@jit
def _near(BITS, lead, row, rows, words, first, key):
    """Which of a tile's keys are near for which rows: a word of 32 bits per row and half tile."""
    low = tl.load(BITS + (lead * rows + row) * words + first // 32, mask=row < rows, other=0)
    high = tl.load(
        BITS + (lead * rows + row) * words + first // 32 + 1, mask=(row < rows) & (first // 32 + 1 < words), other=0
    )
    word = tl.where((key - first < 32)[None, :], low[:, None], high[:, None])
    return ((word >> (key % 32)[None, :]) & 1) != 0


@jit
def _near_down(BITS, lead, row, rows, words, first, key):
    """The same with the keys down and the rows across."""
    low = tl.load(BITS + (lead * rows + row) * words + first // 32, mask=row < rows, other=0)
    high = tl.load(
        BITS + (lead * rows + row) * words + first // 32 + 1, mask=(row < rows) & (first // 32 + 1 < words), other=0
    )
    word = tl.where((key - first < 32)[:, None], low[None, :], high[None, :])
    return ((word >> (key % 32)[:, None]) & 1) != 0


@jit
def coarse_fwd_kernel(
    C, K, V, KEEP, BITS, OUT, MEAN, STATS, LSE, NEAR_LSE,
    rows, m, d, e, heads, group, scale, per, first, step, words, splits, stretch, skb, skh, skm, svb, svh, svm,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, TANGENT: tl.constexpr, WHOLE: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A stretch of the keys. WHOLE: it is all of them, and the answer is the answer; otherwise join_kernel follows."""
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
            near = _near(BITS, lead, row, rows, words, start, key)
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
    if WHOLE:
        safe = tl.where(total > 0, total, 1.0)
        out, mean = out / safe[:, None], mean / safe[:, None]
        tl.store(LSE + place, _natural(total, highest), mask=row < rows)
        tl.store(NEAR_LSE + place, _natural(near_total, near_highest), mask=row < rows)
    else:
        tl.store(STATS + place * 4, highest, mask=row < rows)
        tl.store(STATS + place * 4 + 1, total, mask=row < rows)
        tl.store(STATS + place * 4 + 2, near_highest, mask=row < rows)
        tl.store(STATS + place * 4 + 3, near_total, mask=row < rows)
    tl.store(OUT + place[:, None] * e + values[None, :], out, mask=(row[:, None] < rows) & (values[None, :] < e))
    if TANGENT:
        tl.store(MEAN + place[:, None] * d + dims[None, :], mean, mask=(row[:, None] < rows) & (dims[None, :] < d))


@jit
def _natural(total, highest):
    """The log of a sum of weights relative to 2**highest; -inf for an empty one."""
    safe = tl.where(total > 0, total, 1.0)
    return tl.where(total > 0, (tl.log2(safe) + highest) * 0.6931471805599453, float("-inf"))


@jit
def join_kernel(
    PART, MEANS, STATS, OUT, MEAN, LSE, NEAR_LSE, rows, d, e, splits,
    TANGENT: tl.constexpr, ALL: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The splits of a few rows into one answer each."""
    lead, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BR + tl.arange(0, BR)
    dims, values, every = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, ALL)
    here = (row < rows)[:, None] & (every < splits)[None, :]
    stats = STATS + ((lead * splits + every)[None, :] * rows + row[:, None]) * 4
    high, near_high = (
        tl.load(stats, mask=here, other=float("-inf")), tl.load(stats + 2, mask=here, other=float("-inf"))
    )  # fmt: skip
    level, near_level = tl.max(high, 1), tl.max(near_high, 1)
    level = tl.where(level == float("-inf"), 0.0, level)
    near_level = tl.where(near_level == float("-inf"), 0.0, near_level)
    total = tl.sum(tl.exp2(high - level[:, None]) * tl.load(stats + 1, mask=here, other=0.0), 1)
    near_total = tl.sum(tl.exp2(near_high - near_level[:, None]) * tl.load(stats + 3, mask=here, other=0.0), 1)
    out, mean = tl.zeros((BR, BE), tl.float32), tl.zeros((BR, BD), tl.float32)
    for first in range(0, splits, BS):
        split = first + tl.arange(0, BS)
        there = (row < rows)[:, None] & (split < splits)[None, :]
        place = (lead * splits + split)[None, :] * rows + row[:, None]
        weight = tl.exp2(tl.load(STATS + place * 4, mask=there, other=float("-inf")) - level[:, None])[:, :, None]
        mask = there[:, :, None] & (values < e)[None, None, :]
        part = tl.load(PART + place[:, :, None] * e + values[None, None, :], mask=mask, other=0.0)
        out += tl.sum(weight * part, 1)
        if TANGENT:
            mask = there[:, :, None] & (dims < d)[None, None, :]
            part = tl.load(MEANS + place[:, :, None] * d + dims[None, None, :], mask=mask, other=0.0)
            mean += tl.sum(weight * part, 1)
    safe = tl.where(total > 0, total, 1.0)[:, None]
    place = lead * rows + row
    inside = (row < rows)[:, None]
    tl.store(OUT + place[:, None] * e + values[None, :], out / safe, mask=inside & (values < e)[None, :])
    if TANGENT:
        tl.store(MEAN + place[:, None] * d + dims[None, :], mean / safe, mask=inside & (dims < d)[None, :])
    tl.store(LSE + place, _natural(total, level), mask=row < rows)
    tl.store(NEAR_LSE + place, _natural(near_total, near_level), mask=row < rows)


@jit
def prepare_kernel(
    D_OUT, D_MEAN, D_LSE, D_NEAR, OUT, MEAN, LSE, NEAR_LSE, DY, DM, DELTA, BASE2, NEAR2, DL, DN, total, d, e, parts,
    TANGENT: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_D_NEAR: tl.constexpr, ODDS: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What backward wants of each centroid: gradients added up over their parts, in the keys' dtype; delta; logs in
    base 2, 0 where nothing was seen. ODDS: the gradient of the far lse is that of far against near."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    dims, values, here = tl.arange(0, BD), tl.arange(0, BE), row < total
    inside, across = here[:, None] & (values < e)[None, :], here[:, None] & (dims < d)[None, :]
    dy, dm, dl = tl.zeros((BR, BE), tl.float32), tl.zeros((BR, BD), tl.float32), tl.zeros((BR,), tl.float32)
    for part in range(parts):
        mine = row * parts + part
        dy += tl.load(D_OUT + mine[:, None] * e + values[None, :], mask=inside, other=0.0)
        dl += tl.load(D_LSE + mine, mask=here, other=0.0)
        if TANGENT:
            dm += tl.load(D_MEAN + mine[:, None] * d + dims[None, :], mask=across, other=0.0)
    delta = tl.sum(dy * tl.load(OUT + row[:, None] * e + values[None, :], mask=inside, other=0.0), 1) - dl
    if TANGENT:
        delta += tl.sum(dm * tl.load(MEAN + row[:, None] * d + dims[None, :], mask=across, other=0.0), 1)
        tl.store(DM + row[:, None] * d + dims[None, :], dm.to(DM.dtype.element_ty), mask=across)
    tl.store(DY + row[:, None] * e + values[None, :], dy.to(DY.dtype.element_ty), mask=inside)
    tl.store(DELTA + row, delta, mask=here)
    tl.store(DL + row, dl, mask=here)
    lse = tl.load(LSE + row, mask=here, other=0.0)
    tl.store(BASE2 + row, tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634), mask=here)
    if HAS_NEAR:
        lse = tl.load(NEAR_LSE + row, mask=here, other=0.0)
        tl.store(NEAR2 + row, tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634), mask=here)
        dn = tl.zeros((BR,), tl.float32)
        if ODDS:
            dn = -dl
        elif HAS_D_NEAR:
            dn = tl.load(D_NEAR + row, mask=here, other=0.0)
        tl.store(DN + row, dn, mask=here)


@jit
def dc_kernel(PART, DL, MEAN, DC, rows, d, splits, scale, TANGENT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):
    """The centroids' gradient: the splits of the keys and, where the far lse is a tangent at the centroid, its foot."""
    lead, row, dims = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for first in range(0, splits, BS):
        split = first + tl.arange(0, BS)
        place = (lead * splits + split) * rows + row
        mask = (split < splits)[:, None] & (dims < d)[None, :]
        total += tl.sum(tl.load(PART + place[:, None] * d + dims[None, :], mask=mask, other=0.0), 0)
    if TANGENT:
        mean = tl.load(MEAN + (lead * rows + row) * d + dims, mask=dims < d, other=0.0)
        total -= tl.load(DL + lead * rows + row) * scale * mean
    tl.store(DC + (lead * rows + row) * d + dims, total.to(DC.dtype.element_ty), mask=dims < d)


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
    dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
    if TANGENT:
        dp += tl.dot(dm, tl.trans(k), input_precision=PRECISION)
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
        # keys down, centroids across: weights and gradients enter the next products as they stand
        seen = keep[:, None] & (key[:, None] < _limit(row, m, per, first, step)[None, :]) & here[None, :]
        scores = tl.dot(k, tl.trans(c), input_precision=PRECISION) * scale
        dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
        if TANGENT:
            dp += tl.dot(k, tl.trans(dm), input_precision=PRECISION)
        far = seen
        if HAS_NEAR:
            near = _near_down(BITS, lead, row, rows, words, start, key)
            far = seen & (~near)
        p = tl.where(far, tl.exp2(scores - lse[None, :]), 0.0)
        ds = p * (dp - delta[None, :])
        if HAS_NEAR and not TANGENT:
            ds += tl.where(seen & near, tl.exp2(scores - near_lse[None, :]), 0.0) * d_near[None, :]
        dv += tl.dot(p.to(v.dtype), dy, input_precision=PRECISION)
        dk += tl.dot((ds * natural_scale).to(k.dtype), c, input_precision=PRECISION)
        if TANGENT:
            dk += tl.dot(p.to(k.dtype), dm, input_precision=PRECISION)
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
            near = _near(BITS, lead, row, rows, words, start, key)
        p, ds = _weights(c, k, v, dy, dm, delta, lse, near_lse, d_near, near, seen, scale, HAS_NEAR, TANGENT, PRECISION)
        dc += tl.dot((ds * natural_scale).to(k.dtype), k, input_precision=PRECISION)
    place = (lead * splits + split) * rows + row
    tl.store(DC + place[:, None] * d + dims[None, :], dc, mask=here[:, None] & (dims[None, :] < d))


def why_not(c: Tensor, k: Tensor, v: Tensor, parts: int, slope: bool) -> str | None:
    if parts > 1 or slope:
        return "there is no kernel for parts and slope yet"
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
    wanted = 264 if programs < 128 else 1  # two to each multiprocessor
    splits = max(1, min(_triton.cdiv(m, 4 * tile), _triton.cdiv(wanted, programs)))
    stretch = _triton.cdiv(_triton.cdiv(m, splits), tile) * tile
    return _triton.cdiv(m, stretch), stretch


def forward(
    c: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, reach: Reach
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As reference.forward, and the bit mask of the near keys, which backward wants again."""
    (b, h, clusters, d), (hk, m, e) = c.shape, v.shape[1:]
    c, k, v, top = c.to(k.dtype).contiguous(), rows(k), rows(v), min(reach.top, m)
    keep = None if keep is None else keep.contiguous()
    lead, words = b * h, _triton.cdiv(m, 32)
    near_at = torch.empty(lead, clusters, 0, dtype=torch.int64, device=c.device)
    bits = torch.empty(lead, clusters, 0, dtype=torch.int32, device=c.device)
    if top:
        near_at, bits = select(c, k, keep, reach, top)
    tile = _tiles(k, v, clusters)
    if lead < 128 <= 2 * lead * _triton.cdiv(clusters, tile["BC"]):
        tile["BC"] = min(64, tile["BC"])  # enough programs without cutting the keys, and nothing to join
    row_tiles = _triton.cdiv(clusters, tile["BC"])
    splits, stretch = _splits(m, lead * row_tiles, tile["BM"])

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=c.device)

    out, mean = new(b, h, clusters, e), new(b, h, clusters, d if reach.tangent else 0)
    lse, near_lse = new(b, h, clusters), new(b, h, clusters)
    whole = splits == 1
    part = out if whole else new(lead, splits, clusters, e)
    means = mean if whole else new(lead, splits, clusters, d if reach.tangent else 0)
    stats = new(lead, 0 if whole else splits, clusters, 4)
    coarse_fwd_kernel[(splits, row_tiles, lead)](
        c, k, v, keep if keep is not None else c, bits, part, means, stats, lse, near_lse,
        clusters, m, d, e, h, h // hk, reach.scale * LOG2E, reach.per, reach.first, reach.step, words, splits, stretch,
        *k.stride()[:3], *v.stride()[:3],
        HAS_KEEP=keep is not None, HAS_NEAR=top > 0, TANGENT=reach.tangent, WHOLE=whole,
        PRECISION=precision(k), num_warps=4, **tile,
    )  # fmt: skip
    if not whole:
        few = min(32, power(splits, least=1))
        each = 32 // few
        join_kernel[(_triton.cdiv(clusters, each), lead)](
            part, means, stats, out, mean, lse, near_lse, clusters, d, e, splits,
            TANGENT=reach.tangent, ALL=power(splits, least=1), BR=each, BS=few, BD=tile["BD"], BE=tile["BE"],
            num_warps=4,
        )  # fmt: skip
    return out, mean, lse, near_lse, near_at.view(b, h, clusters, top), bits.view(b, h, clusters, -1)


def backward(
    d_out: Tensor, d_mean: Tensor, d_lse: Tensor, d_near: Tensor | None,
    c: Tensor, k: Tensor, v: Tensor, keep: Tensor | None,
    out: Tensor, mean_key: Tensor, lse: Tensor, near_lse: Tensor, bits: Tensor, reach: Reach, *,
    splits: int = 1, near: tuple[Tensor, Tensor, Tensor] | None = None, odds: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients (lead c splits ...) of what forward found. ``near``: where the near keys are (b h c t), and gradients
    (lead c splits t ...) of them and of their values, to be added; the far lse is then the foot of a tangent at the
    centroid (reach.tangent). odds: d_lse is the gradient of far lse less near lse."""
    (b, h, clusters, d), (hk, m, e) = c.shape, v.shape[1:]
    dtype, c, k, v = c.dtype, c.to(k.dtype).contiguous(), rows(k), rows(v)
    keep = None if keep is None else keep.contiguous()
    lead, words, has_near = b * h, _triton.cdiv(m, 32), reach.top > 0

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=c.device)

    tile = _tiles(k, v, clusters)
    tile["BC"] = min(64 if (tile["BD"] + tile["BE"]) * k.element_size() <= 256 else 32, tile["BC"])
    dy, dm = new(lead, clusters, e, dtype=v.dtype), new(lead, clusters, d if reach.tangent else 0, dtype=k.dtype)
    delta, base2, near2, dl, dn = new(5, lead, clusters)
    prepare_kernel[(_triton.cdiv(lead * clusters, 8),)](
        d_out.contiguous(), d_mean.contiguous(), d_lse.contiguous(), dn if d_near is None else d_near.contiguous(),
        out, mean_key, lse, near_lse, dy, dm, delta, base2, near2, dl, dn, lead * clusters, d, e, splits,
        TANGENT=reach.tangent, HAS_NEAR=has_near, HAS_D_NEAR=d_near is not None, ODDS=odds,
        BR=8, BD=tile["BD"], BE=tile["BE"], num_warps=4,
    )  # fmt: skip
    shared = (c, k, v, keep if keep is not None else c, bits, dy, dm, delta, base2, near2, dn)
    sizes = (clusters, m, d, e, h, h // hk, reach.scale * LOG2E, reach.scale, reach.per, reach.first, reach.step, words)
    strides = (*k.stride()[:3], *v.stride()[:3])
    flags = {
        "HAS_KEEP": keep is not None, "HAS_NEAR": has_near, "TANGENT": reach.tangent, "PRECISION": precision(k),
        "num_warps": 4,
    }  # fmt: skip
    dk, dv = new(b, hk, m, d, dtype=k.dtype), new(b, hk, m, e, dtype=v.dtype)
    coarse_bwd_kv_kernel[(_triton.cdiv(m, tile["BM"]), b * hk)](
        *shared, dk, dv, *sizes, *strides, num_stages=1, **flags, **tile
    )
    if near is not None:
        add_near(dk, dv, *near, splits)
    row_tiles = _triton.cdiv(clusters, tile["BC"])
    cuts, stretch = _splits(m, lead * row_tiles, tile["BM"])
    part, dc = new(lead, cuts, clusters, d), new(b, h, clusters, d, dtype=dtype)
    coarse_bwd_c_kernel[(cuts, row_tiles, lead)](*shared, part, *sizes, cuts, stretch, *strides, **flags, **tile)
    dc_kernel[(clusters, lead)](
        part, dl, mean_key, dc, clusters, d, cuts, reach.scale,
        TANGENT=reach.tangent and near is not None, BS=min(32, power(cuts, least=1)), BD=tile["BD"],
        num_warps=1 if cuts < 16 else 4,
    )  # fmt: skip
    return dc, dk, dv
