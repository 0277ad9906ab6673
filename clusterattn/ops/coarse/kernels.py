"""Centroid attention on tensor cores, split over the keys and joined by log-sum-exp in a fixed order.

Keys that fall into parts are sorted by part first (arrange.py): a part is a stretch of keys, and everything else is as
without parts. Near keys come from near.py, as a bit mask that the pass over the keys leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._aside import beside
from .._jit import THIN, in_turn, jit, power, precision, registers, tl, widths
from .._launch import cdiv, joined, launch
from .arrange import Arranged, rows_of
from .near import _limit, across, marked, near_across, select
from .reference import Reach
from .slope import slope_of

LOG2E = 1.4426950408889634


@jit
def _stretch(FIRST, place, part, parts, m, split, splits, stretch, HAS_PARTS: tl.constexpr, BM: tl.constexpr):
    """The keys of a part, and the tiles that one of its splits walks over. Tiles begin at whole words of the bit mask:
    a part's first tile may hold keys of the one before."""
    begin, end, first = 0, m, 0
    if HAS_PARTS:
        begin = tl.load(FIRST + place * (parts + 2) + part)
        end = tl.load(FIRST + place * (parts + 2) + part + 1)
        first = begin // 32 * 32
        stretch = tl.cdiv(tl.cdiv(end - first, splits), BM) * BM
    return begin, end, first + split * stretch, tl.minimum(first + (split + 1) * stretch, end)


@jit
def coarse_fwd_kernel(
    C, K, V, KEEP, ORDER, BITS, FIRST, LARGEST, OUT, MEAN, STATS, LSE, NEAR_LSE, LEVEL,
    rows, m, d, e, heads, group, scale, per, first, step, words, parts, splits, stretch,
    skb, skh, skm, svb, svh, svm, seb, seh,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_PARTS: tl.constexpr, BY_ORDER: tl.constexpr,
    TANGENT: tl.constexpr,
    WHOLE: tl.constexpr, PREFIX: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A stretch of the keys. WHOLE: it is all of its part, and the answer is the answer; else join_kernel follows.
    PREFIX: rows see keys up to a limit of their own.

    Parts differ in size, and one that starts last would be waited for: the largest come first, of all heads."""
    in_turn()
    split, part, lead = tl.program_id(2) % splits, tl.program_id(2) // splits, tl.program_id(0).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    key_lead = batch * (heads // group) + head
    if HAS_PARTS:
        part = tl.load(LARGEST + key_lead * parts + part)
    row, dims, values = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BD), tl.arange(0, BE)
    c = tl.load(
        C + (lead * rows + row[:, None]) * d + dims[None, :],
        mask=(row[:, None] < rows) & (dims[None, :] < d),
        other=0.0,
    )
    begin, end, low, stop = _stretch(FIRST, key_lead, part, parts, m, split, splits, stretch, HAS_PARTS, BM)
    slope = tl.where(scale == 0, 1.0, tl.abs(scale))  # above zero, so that the largest product is the largest logit
    c = tl.where(scale == 0, 0.0, tl.where(scale < 0, -c, c)).to(c.dtype)
    limit = row
    if PREFIX:
        limit = tl.minimum(_limit(row, m, per, first, step), end)
        stop = tl.minimum(stop, tl.max(tl.where(row < rows, limit, 0)))
    highest, total = tl.full((BC,), float("-inf"), tl.float32), tl.zeros((BC,), tl.float32)
    near_highest, near_total = tl.full((BC,), float("-inf"), tl.float32), tl.zeros((BC,), tl.float32)
    out = tl.zeros((BC, BE), tl.float32)
    mean = tl.zeros((BC, BD), tl.float32)
    place, wide, long = tl.arange(0, BM), (dims < d)[None, :], (values < e)[None, :]
    k_base, v_base = K + batch * skb + head * skh, V + batch * svb + head * svh
    for start in range(low, stop, BM):
        there = (place < m - start)[:, None]
        if BY_ORDER:  # places past the end are looked up as key 0, whose weight is 0
            there = (place >= 0)[:, None]
        key = rows_of(ORDER, key_lead, start + place, m, BY_ORDER)
        at = key.to(tl.int64)[:, None]
        k = tl.load(k_base + at * skm + dims[None, :], mask=there & wide, other=0.0)
        s = tl.dot(c, tl.trans(k), input_precision=PRECISION)
        if HAS_KEEP:
            keep = tl.load(KEEP + batch * seb + head * seh + key, mask=place < m - start, other=0) != 0
            s = tl.where(keep[None, :], s, float("-inf"))
        if PREFIX:
            s = tl.where(start + place[None, :] < limit[:, None], s, float("-inf"))
        if TANGENT:  # what is near or of another part, in one mask
            s = tl.where(across(BITS, lead, row, rows, words, start, begin, end, place, HAS_NEAR), float("-inf"), s)
        else:
            s = tl.where(across(BITS, lead, row, rows, words, start, begin, end, place, False), float("-inf"), s)
            if HAS_NEAR:
                near = near_across(BITS, lead, row, rows, words, start, place)
                theirs = tl.where(near, s, float("-inf"))
                new = tl.maximum(near_highest, tl.max(theirs, 1))
                safe = tl.where(new == float("-inf"), 0.0, new)
                level, fade = safe * slope, tl.exp2((near_highest - safe) * slope)
                near_total = near_total * fade + tl.sum(tl.exp2(theirs * slope - level[:, None]), 1)
                near_highest = new
                s = tl.where(near, float("-inf"), s)
        new = tl.maximum(highest, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        # exactly 1 where the highest stays: a product less a rounded product is not 0 once the compiler fuses them
        level, fade = safe * slope, tl.exp2((highest - safe) * slope)
        p = tl.exp2(s * slope - level[:, None])
        highest, total = new, total * fade + tl.sum(p, 1)
        v = tl.load(v_base + at * svm + values[None, :], mask=there & long, other=0.0)
        out = out * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        if TANGENT:
            mean = mean * fade[:, None] + tl.dot(p.to(k.dtype), k, input_precision=PRECISION)
    highest, near_highest = highest * slope, near_highest * slope
    place = ((lead * splits + split) * parts + part) * rows + row
    if WHOLE:
        safe = tl.where(total > 0, total, 1.0)
        out, mean = out / safe[:, None], mean / safe[:, None]
        lse = _natural(total, highest)
        tl.store(LSE + place, lse, mask=row < rows)
        if TANGENT:
            tl.store(LEVEL + place, _level(lse, mean.to(MEAN.dtype.element_ty), c, slope), mask=row < rows)
        if part == 0:
            tl.store(NEAR_LSE + lead * rows + row, _natural(near_total, near_highest), mask=row < rows)
    else:
        tl.store(STATS + place * 4, highest, mask=row < rows)
        tl.store(STATS + place * 4 + 1, total, mask=row < rows)
        tl.store(STATS + place * 4 + 2, near_highest, mask=row < rows)
        tl.store(STATS + place * 4 + 3, near_total, mask=row < rows)
    tl.store(
        OUT + place[:, None] * e + values[None, :], out.to(OUT.dtype.element_ty),
        mask=(row[:, None] < rows) & (values[None, :] < e),
    )  # fmt: skip
    if TANGENT:
        tl.store(
            MEAN + place[:, None] * d + dims[None, :], mean.to(MEAN.dtype.element_ty),
            mask=(row[:, None] < rows) & (dims[None, :] < d),
        )  # fmt: skip


@jit
def _level(lse, mean, c, scale):
    """What a query adds to its product with the mean key of a part, in base 2: the tangent's height at q = 0."""
    return lse * 1.4426950408889634 - tl.sum(mean.to(tl.float32) * c.to(tl.float32), 1) * scale


@jit
def _natural(total, highest):
    """The log of a sum of weights relative to 2**highest; -inf for an empty one."""
    safe = tl.where(total > 0, total, 1.0)
    return tl.where(total > 0, (tl.log2(safe) + highest) * 0.6931471805599453, float("-inf"))


@jit
def join_kernel(
    PART, MEANS, STATS, C, OUT, MEAN, LSE, NEAR_LSE, LEVEL, rows, near_rows, d, e, splits, scale,
    TANGENT: tl.constexpr, ALL: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The splits of a few rows into one answer each; near keys are counted with the first part alone."""
    in_turn()
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
    lse = _natural(total, level)
    out, mean = (out / safe).to(OUT.dtype.element_ty), (mean / safe).to(MEAN.dtype.element_ty)
    tl.store(OUT + place[:, None] * e + values[None, :], out, mask=inside & (values < e)[None, :])
    if TANGENT:
        tl.store(MEAN + place[:, None] * d + dims[None, :], mean, mask=inside & (dims < d)[None, :])
        centroid = lead * near_rows + row % near_rows
        c = tl.load(C + centroid[:, None] * d + dims[None, :], mask=inside & (dims < d)[None, :], other=0.0)
        tl.store(LEVEL + place, _level(lse, mean, c, scale), mask=row < rows)
    tl.store(LSE + place, lse, mask=row < rows)
    tl.store(NEAR_LSE + lead * near_rows + row, _natural(near_total, near_level), mask=row < near_rows)


@dataclass(frozen=True)
class Far:
    """What the centroids found, as kernels hold it: the rows of a part follow each other. Means are in the dtype of the
    keys and values where queries will attend to them, as to any key."""

    out: Tensor  # (b*h p c e)
    mean_key: Tensor  # (b*h p c d), or (b*h p c 0)
    lse: Tensor  # (b*h p c)
    near_lse: Tensor  # (b*h c)
    near_at: Tensor  # (b*h c t)
    bits: Tensor  # (b*h words c): the same as a mask of the keys in the order of their parts
    slope: Tensor  # (b*h blocks d e), or (b*h 0 d e)
    # forward alone reads these:
    level: Tensor | None = None  # (b*h p c): see _level
    came: Tensor | None = None  # the mask of the keys as they came


def tiles_for(k: Tensor, v: Tensor, clusters: int) -> dict[str, Any]:
    """Tile sizes by the bytes of a key with its value: what shared memory has room for."""
    d, e = widths(k, v)
    width = (d + e) * k.element_size()
    most = 128 if width <= 256 else 64 if width <= 512 else 32
    rest = {"BM": 64, "num_stages": 3} if width <= 1024 else {"BM": 32, "num_stages": 1}
    return {"BC": min(most, power(clusters, THIN)), "BD": d, "BE": e, **rest}


def _forward_tiles(k: Tensor, v: Tensor, clusters: int, lead: int, parts: int) -> dict[str, Any]:
    tile = tiles_for(k, v, clusters) | {"num_warps": 4}
    if lead < 128 <= 2 * lead * parts * cdiv(clusters, tile["BC"]):
        tile["BC"] = min(64, tile["BC"])  # enough programs without cutting the keys, and nothing to join
    return tile


def cuts(m: int, programs: int, tile: int, parts: int = 1) -> tuple[int, int]:
    """How often the keys (of a part) are cut, and the keys per cut: enough programs for a large chip, whole tiles."""
    wanted = 264 if programs * parts < 128 else 1  # two to each multiprocessor
    splits = max(1, min(cdiv(m, 4 * tile * parts), cdiv(wanted, programs * parts)))
    stretch = cdiv(cdiv(m, splits), tile) * tile
    return cdiv(m, stretch) if parts == 1 else splits, stretch


def forward(c: Tensor, keys: Arranged, pi: Tensor | None, reach: Reach, dtype: torch.dtype = torch.float32) -> Far:
    """c (b h c d) over the arranged keys; pi (b h c) where the slope is wanted. dtype: of the means."""
    k, v, parts = keys.k, keys.v, reach.parts
    (b, h, clusters, d), (hk, m, e) = c.shape, v.shape[1:]
    c, top = c.to(k.dtype).contiguous(), min(reach.top, m)
    lead, words = b * h, cdiv(m, 32)
    near_at = torch.empty(lead, clusters, 0, dtype=torch.int64, device=c.device)
    bits = torch.empty(lead, 0, clusters, dtype=torch.int32, device=c.device)
    came = bits
    if top:
        with beside(c, k, *([] if keys.keep is None else [keys.keep])) as chain:  # while parts are made
            near_at, came, bits = select(c, keys, reach, top)
            chain.gives(near_at, came, bits)
    joined()
    if top:
        marked(near_at, bits, keys, h)
    tile = _forward_tiles(k, v, clusters, lead, parts)
    row_tiles = cdiv(clusters, tile["BC"])
    splits, stretch = cuts(m, lead * row_tiles, tile["BM"], parts)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=c.device)

    width = d if reach.tangent else 0
    out, mean = new(lead, parts, clusters, e, dtype=dtype), new(lead, parts, clusters, width, dtype=dtype)
    lse, near_lse, level = new(lead, parts, clusters), new(lead, clusters), new(lead, parts, clusters)
    whole = splits == 1
    part = out if whole else new(lead, splits, parts, clusters, e)
    means = mean if whole else new(lead, splits, parts, clusters, width)
    stats = new(lead, 0 if whole else splits, parts, clusters, 4)
    launch(
        coarse_fwd_kernel, (lead, row_tiles, splits * parts),
        (c, k, v, keys.keep_or(c), keys.order_or(c), bits, keys.first_or(c), keys.largest_or(c), part, means, stats,
        lse, near_lse, level),
        (clusters, m, d, e, h, h // hk, reach.scale * LOG2E, reach.per, reach.first, reach.step, words, parts, splits,
        stretch, *k.stride()[:3], *v.stride()[:3], *keys.keep_strides),
        HAS_KEEP=keys.keep is not None, HAS_NEAR=top > 0, HAS_PARTS=keys.first is not None,
        BY_ORDER=keys.by_order, TANGENT=reach.tangent, WHOLE=whole, PREFIX=reach.per > 0, PRECISION=precision(k),
        **registers(k, v), **tile,
    )  # fmt: skip
    if not whole:
        few = min(32, power(splits, least=1))
        each = 32 // few
        launch(
            join_kernel, (cdiv(parts * clusters, each), lead), (part, means, stats, c, out, mean, lse, near_lse, level),
            (parts * clusters, clusters, d, e, splits, reach.scale * LOG2E),
            TANGENT=reach.tangent, ALL=power(splits, least=1), BR=each, BS=few, BD=tile["BD"], BE=tile["BE"],
            num_warps=4,
        )  # fmt: skip
    found = Far(out, mean, lse, near_lse, near_at, bits, new(lead, 0, d, e, dtype=dtype), level, came)
    return found if pi is None else slope_of(found, c, keys, pi, reach)
