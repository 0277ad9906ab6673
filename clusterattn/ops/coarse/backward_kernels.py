"""Gradients of centroid attention: the weights are computed anew, once with the keys standing still and once with the
centroids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._jit import jit, narrow, power, precision, tl
from .._launch import cdiv, launch
from .arrange import Arranged
from .kernels import LOG2E, Far, _stretch, cuts, tiles_for
from .near import _limit, near_across, near_down
from .reference import Reach
from .slope_backward import Rows, pulled_rows

WHOLE_SLOPE = 1 << 15  # bytes that are held at once beside a tile of keys


@jit
def prepare_kernel(
    D_OUT, D_MEAN, D_LSE, D_NEAR, OUT, MEAN, LSE, NEAR_LSE, DY, DM, DELTA, BASE2, NEAR2, DN, total, d, e,
    TANGENT: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_D_NEAR: tl.constexpr, ODDS: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What backward wants of each row: gradients in the keys' dtype; delta; logs in base 2, 0 where nothing was seen.
    ODDS: the gradient of the far lse is that of far against near."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    dims, values, here = tl.arange(0, BD), tl.arange(0, BE), row < total
    inside, across = here[:, None] & (values < e)[None, :], here[:, None] & (dims < d)[None, :]
    dy = tl.load(D_OUT + row[:, None] * e + values[None, :], mask=inside, other=0.0)
    dl = tl.load(D_LSE + row, mask=here, other=0.0)
    delta = tl.sum(dy * tl.load(OUT + row[:, None] * e + values[None, :], mask=inside, other=0.0), 1) - dl
    if TANGENT:
        dm = tl.load(D_MEAN + row[:, None] * d + dims[None, :], mask=across, other=0.0)
        delta += tl.sum(dm * tl.load(MEAN + row[:, None] * d + dims[None, :], mask=across, other=0.0), 1)
        tl.store(DM + row[:, None] * d + dims[None, :], dm.to(DM.dtype.element_ty), mask=across)
    tl.store(DY + row[:, None] * e + values[None, :], dy.to(DY.dtype.element_ty), mask=inside)
    tl.store(DELTA + row, delta, mask=here)
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
def dc_kernel(
    PART, DL, MEAN, FEET, FEET_FIRST, DC, rows, d, splits, parts, turns, scale,
    FOOT: tl.constexpr, HAS_FEET: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr, BF: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """The centroids' gradient: the splits of the keys and, where the far lse is a tangent at the centroid, its foot.
    FEET (lead turns d): those of the slope, from FEET_FIRST (lead c+2) on."""
    lead, row, dims = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for first in range(0, splits, BS):
        split = first + tl.arange(0, BS)
        place = (lead * splits + split) * rows + row
        mask = (split < splits)[:, None] & (dims < d)[None, :]
        total += tl.sum(tl.load(PART + place[:, None] * d + dims[None, :], mask=mask, other=0.0), 0)
    if FOOT:
        for first in range(0, parts, BP):
            part = first + tl.arange(0, BP)
            place = (lead * parts + part) * rows + row
            dl = tl.load(DL + place, mask=part < parts, other=0.0) * scale
            mask = (part < parts)[:, None] & (dims < d)[None, :]
            mean = tl.load(MEAN + place[:, None] * d + dims[None, :], mask=mask, other=0.0)
            total -= tl.sum(dl[:, None] * mean, 0)
    if HAS_FEET:
        begin = tl.load(FEET_FIRST + lead * (rows + 2) + row)
        end = tl.load(FEET_FIRST + lead * (rows + 2) + row + 1)
        for first in range(begin, end, BF):
            foot = first + tl.arange(0, BF)
            place = (lead * turns + foot)[:, None] * d + dims[None, :]
            mask = (foot < end)[:, None] & (dims < d)[None, :]
            total += tl.sum(tl.load(FEET + place, mask=mask, other=0.0), 0)
    tl.store(DC + (lead * rows + row) * d + dims, total.to(DC.dtype.element_ty), mask=dims < d)


@jit
def _part_of(FIRST, place, parts, tile, BP: tl.constexpr, BM: tl.constexpr):
    """Parts cut into tiles, one after another: the part of tile number ``tile``, the tile's first key and the part's
    end; no keys past the last tile. Keys of no part are one more."""
    part = tl.arange(0, BP)
    begin = tl.load(FIRST + place * (parts + 2) + part, mask=part <= parts, other=0)
    end = tl.load(FIRST + place * (parts + 2) + part + 1, mask=part <= parts, other=0)
    count = tl.where(part <= parts, (end - begin // 32 * 32 + BM - 1) // BM, 0)
    count = tl.where(end > begin, count, 0)
    last = tl.cumsum(count, 0)
    mine = (last > tile) & (last - count <= tile)
    found = tl.sum(tl.where(mine, part, 0), 0)
    start = tl.sum(tl.where(mine, begin // 32 * 32 + (tile - (last - count)) * BM, 0), 0)
    low, stop = tl.sum(tl.where(mine, begin, 0), 0), tl.sum(tl.where(mine, end, 0), 0)
    return found, start, low, stop


@jit
def coarse_bwd_kv_kernel(
    C, K, V, KEEP, BITS, FIRST, DY, DM, DELTA, LSE, NEAR_LSE, D_NEAR, AMOUNT, PULL, D_SLOPE, DK, DV,
    rows, m, d, e, heads, group, scale, natural_scale, per, first, step, words, parts,
    skb, skh, skm, svb, svh, svm, seb, seh,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_PARTS: tl.constexpr, TANGENT: tl.constexpr,
    SLOPE: tl.constexpr, PREFIX: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the keys of one part. SLOPE (one block): what the gradient of the slope asks of them as well. BV: by so
    many of its columns, then rows; 0: all at once."""
    place = tl.program_id(1).to(tl.int64)
    kv_heads = heads // group
    batch, kv_head = place // kv_heads, place % kv_heads
    part, start, begin, end, seeing = 0, tl.program_id(0) * BM, 0, m, rows
    if HAS_PARTS:
        part, start, begin, end = _part_of(FIRST, place, parts, tl.program_id(0), BP, BM)
        seeing = tl.where(part < parts, rows, 0)  # keys of no part (padding) are nobody's: their gradients are 0
    key, dims, values = start + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    at, keep = key.to(tl.int64)[:, None], (key >= begin) & (key < end)
    of_k, of_v = (key < m)[:, None] & (dims < d)[None, :], (key < m)[:, None] & (values < e)[None, :]
    k = tl.load(K + batch * skb + kv_head * skh + at * skm + dims[None, :], mask=of_k, other=0.0)
    v = tl.load(V + batch * svb + kv_head * svh + at * svm + values[None, :], mask=of_v, other=0.0)
    mine = keep
    if HAS_KEEP:
        keep = keep & (tl.load(KEEP + batch * seb + kv_head * seh + key, mask=key < m, other=0) != 0)
    dk, dv = tl.zeros((BM, BD), tl.float32), tl.zeros((BM, BE), tl.float32)
    for one in range(group):
        lead = batch * heads + kv_head * group + one
        omega, pull = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
        if SLOPE:
            pull = tl.load(PULL + lead * m + key, mask=key < m, other=0.0)
        for of in range(0, seeing, BC):
            row = of + tl.arange(0, BC)
            here = row < rows
            centroid, far_row = lead * rows + row, (lead * parts + part) * rows + row
            of_d, of_e = here[:, None] & (dims[None, :] < d), here[:, None] & (values[None, :] < e)
            c = tl.load(C + centroid[:, None] * d + dims[None, :], mask=of_d, other=0.0)
            dy = tl.load(DY + far_row[:, None] * e + values[None, :], mask=of_e, other=0.0)
            dm = c
            if TANGENT:
                dm = tl.load(DM + far_row[:, None] * d + dims[None, :], mask=of_d, other=0.0)
            lse, delta = tl.load(LSE + far_row, mask=here, other=0.0), tl.load(DELTA + far_row, mask=here, other=0.0)
            # keys down, centroids across: weights and gradients enter the next products as they stand
            # (rows that are not there have no gradients: whatever they see, nothing comes of it)
            seen = tl.broadcast_to(keep[:, None], (BM, BC))
            if PREFIX:
                seen = seen & (key[:, None] < _limit(row, m, per, first, step)[None, :])
            scores = tl.dot(k, tl.trans(c), input_precision=PRECISION) * scale
            dp = tl.dot(v, tl.trans(dy), input_precision=PRECISION)
            if TANGENT:
                dp += tl.dot(k, tl.trans(dm), input_precision=PRECISION)
            far = seen
            if HAS_NEAR:
                near = near_down(BITS, lead, row, rows, words, start, tl.arange(0, BM))
                far = seen & (~near)
            p = tl.where(far, tl.exp2(scores - lse[None, :]), 0.0)
            if SLOPE:
                amount = tl.load(AMOUNT + far_row, mask=here, other=0.0)
                omega += tl.sum(p * amount[None, :], 1)
                dp += pull[:, None] * amount[None, :]
            ds = p * (dp - delta[None, :])
            if HAS_NEAR and not TANGENT:
                near_lse = tl.load(NEAR_LSE + centroid, mask=here, other=0.0)
                d_near = tl.load(D_NEAR + centroid, mask=here, other=0.0)
                ds += tl.where(seen & near, tl.exp2(scores - near_lse[None, :]), 0.0) * d_near[None, :]
            dv += tl.dot(p.to(v.dtype), dy, input_precision=PRECISION)
            dk += tl.dot((ds * natural_scale).to(k.dtype), c, input_precision=PRECISION)
            if TANGENT:
                dk += tl.dot(p.to(k.dtype), dm, input_precision=PRECISION)
        if SLOPE:
            k_base, v_base = K + batch * skb + kv_head * skh, V + batch * svb + kv_head * svh
            slope = D_SLOPE + lead * d * e
            if BV == 0:
                kappa = tl.load(k_base + dims, mask=dims < d, other=0.0).to(tl.float32)
                nu = tl.load(v_base + values, mask=values < e, other=0.0).to(tl.float32)
                turned = tl.load(
                    slope + dims[:, None] * e + values[None, :], mask=(dims < d)[:, None] & (values < e)[None, :],
                    other=0.0,
                ).to(k.dtype)  # fmt: skip
                x = ((k.to(tl.float32) - kappa[None, :]) * omega[:, None]).to(k.dtype)
                y = ((v.to(tl.float32) - nu[None, :]) * omega[:, None]).to(v.dtype)
                dk += tl.dot(y, tl.trans(turned), input_precision=PRECISION)
                dv += tl.dot(x, turned, input_precision=PRECISION)
            else:
                strip = tl.arange(0, BV)
                for column in range(0, e, BV):
                    long = column + strip < e
                    y = tl.load(v_base + at * svm + column + strip[None, :], mask=(at < m) & long[None, :], other=0.0)
                    nu = tl.load(v_base + column + strip, mask=long, other=0.0).to(tl.float32)
                    turned = tl.load(
                        slope + dims[:, None] * e + column + strip[None, :], mask=(dims < d)[:, None] & long[None, :],
                        other=0.0,
                    ).to(k.dtype)  # fmt: skip
                    y = ((y.to(tl.float32) - nu[None, :]) * omega[:, None]).to(v.dtype)
                    dk += tl.dot(y, tl.trans(turned), input_precision=PRECISION)
                for line in range(0, d, BV):
                    wide = line + strip < d
                    x = tl.load(k_base + at * skm + line + strip[None, :], mask=(at < m) & wide[None, :], other=0.0)
                    kappa = tl.load(k_base + line + strip, mask=wide, other=0.0).to(tl.float32)
                    turned = tl.load(
                        slope + (line + strip[:, None]) * e + values[None, :],
                        mask=wide[:, None] & (values < e)[None, :], other=0.0,
                    ).to(k.dtype)  # fmt: skip
                    x = ((x.to(tl.float32) - kappa[None, :]) * omega[:, None]).to(k.dtype)
                    dv += tl.dot(x, turned, input_precision=PRECISION)
    out = (place * m + key)[:, None]
    tl.store(DK + out * d + dims[None, :], dk.to(DK.dtype.element_ty), mask=mine[:, None] & (dims[None, :] < d))
    tl.store(DV + out * e + values[None, :], dv.to(DV.dtype.element_ty), mask=mine[:, None] & (values[None, :] < e))


@jit
def coarse_bwd_c_kernel(
    C, K, V, KEEP, BITS, FIRST, DY, DM, DELTA, LSE, NEAR_LSE, D_NEAR, AMOUNT, PULL, DC,
    rows, m, d, e, heads, group, scale, natural_scale, per, first, step, words, parts, splits, stretch,
    skb, skh, skm, svb, svh, svm, seb, seh,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_PARTS: tl.constexpr, TANGENT: tl.constexpr,
    SLOPE: tl.constexpr, PREFIX: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    split, part, lead = tl.program_id(0) % splits, tl.program_id(0) // splits, tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    row, dims, values = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BD), tl.arange(0, BE)
    here, mine, far_row = row < rows, lead * rows + row, (lead * parts + part) * rows + row
    of_d, of_e = here[:, None] & (dims[None, :] < d), here[:, None] & (values[None, :] < e)
    c = tl.load(C + mine[:, None] * d + dims[None, :], mask=of_d, other=0.0)
    dy = tl.load(DY + far_row[:, None] * e + values[None, :], mask=of_e, other=0.0)
    dm = c
    if TANGENT:
        dm = tl.load(DM + far_row[:, None] * d + dims[None, :], mask=of_d, other=0.0)
    lse, delta = tl.load(LSE + far_row, mask=here, other=0.0), tl.load(DELTA + far_row, mask=here, other=0.0)
    begin, end, low, stop = _stretch(
        FIRST, batch * (heads // group) + head, part, parts, m, split, splits, stretch, HAS_PARTS, BM
    )
    limit = row
    if PREFIX:
        limit = tl.minimum(_limit(row, m, per, first, step), end)
        stop = tl.minimum(stop, tl.max(tl.where(here, limit, 0)))
    dc = tl.zeros((BC, BD), tl.float32)
    for start in range(low, stop, BM):
        key = start + tl.arange(0, BM)
        at = key.to(tl.int64)[:, None]
        k = tl.load(
            K + batch * skb + head * skh + at * skm + dims[None, :], mask=(at < m) & (dims[None, :] < d), other=0.0
        )
        v = tl.load(
            V + batch * svb + head * svh + at * svm + values[None, :], mask=(at < m) & (values[None, :] < e), other=0.0
        )
        inside = (key >= begin) & (key < end)
        if HAS_KEEP:
            inside = inside & (tl.load(KEEP + batch * seb + head * seh + key, mask=key < m, other=0) != 0)
        seen = tl.broadcast_to(inside[None, :], (BC, BM))
        if PREFIX:
            seen = seen & (key[None, :] < limit[:, None])
        s = tl.dot(c, tl.trans(k), input_precision=PRECISION) * scale
        far = seen
        if HAS_NEAR:
            near = near_across(BITS, lead, row, rows, words, start, tl.arange(0, BM))
            far = seen & (~near)
        p = tl.where(far, tl.exp2(s - lse[:, None]), 0.0)
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        if TANGENT:
            dp += tl.dot(dm, tl.trans(k), input_precision=PRECISION)
        if SLOPE:
            amount = tl.load(AMOUNT + far_row, mask=here, other=0.0)
            dp += amount[:, None] * tl.load(PULL + lead * m + key, mask=key < m, other=0.0)[None, :]
        ds = p * (dp - delta[:, None])
        if HAS_NEAR and not TANGENT:
            near_lse = tl.load(NEAR_LSE + mine, mask=here, other=0.0)
            d_near = tl.load(D_NEAR + mine, mask=here, other=0.0)
            ds += tl.where(seen & near, tl.exp2(s - near_lse[:, None]), 0.0) * d_near[:, None]
        dc += tl.dot((ds * natural_scale).to(k.dtype), k, input_precision=PRECISION)
    place = ((lead * splits + split) * parts + part) * rows + row
    tl.store(DC + place[:, None] * d + dims[None, :], dc, mask=of_d)


class Feet(NamedTuple):
    """Gradients of the centroids, where the slope stands, turn by turn."""

    listed: Tensor  # (b*h turns d)
    first: Tensor  # (b*h c+2): where those of each centroid begin


@dataclass(frozen=True)
class Given:
    """Gradients of what forward found, (b*h p c ...)."""

    out: Tensor
    mean_key: Tensor
    lse: Tensor
    near_lse: Tensor | None  # (b*h c)
    slope: Tensor | None  # (b*h d e): one block
    feet: Feet | None


def _rows(given: Given, keys: Arranged, found: Far, reach: Reach, odds: bool) -> Rows:
    """Without a slope."""
    k, v = keys.k, keys.v
    d, e, count, has_near = k.shape[3], v.shape[3], found.lse.numel(), reach.top > 0 and not reach.tangent

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=k.device)

    dy, dm = new(count, e, dtype=v.dtype), new(count, d if reach.tangent else 0, dtype=k.dtype)
    delta, base2, near2, dn = new(4, count)
    launch(
        prepare_kernel, (cdiv(count, 8),),
        (given.out.contiguous(), given.mean_key.contiguous(), given.lse.contiguous(),
        dn if given.near_lse is None else given.near_lse.contiguous(), found.out, found.mean_key, found.lse,
        found.near_lse, dy, dm, delta, base2, near2, dn), (count, d, e),
        TANGENT=reach.tangent, HAS_NEAR=has_near, HAS_D_NEAR=given.near_lse is not None, ODDS=odds, BR=8, BD=power(d),
        BE=power(e), num_warps=4,
    )  # fmt: skip
    return Rows(dy, dm, delta, base2, near2, dn, delta, delta, delta)


def backward(
    given: Given, c: Tensor, keys: Arranged, pi: Tensor | None, found: Far, reach: Reach, *,
    foot: bool = False, odds: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dc (b h c d), and dk, dv of the arranged keys. foot: the far lse is the foot of a tangent at the centroid; odds:
    the gradient of the far lse is that of far lse less near lse."""
    k, v, parts = keys.k, keys.v, reach.parts
    (b, h, clusters, d), (hk, m, e) = c.shape, v.shape[1:]
    dtype, c = c.dtype, c.to(k.dtype).contiguous()
    lead, words, has_near = b * h, cdiv(m, 32), reach.top > 0

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=c.device)

    if pi is None:
        row = _rows(given, keys, found, reach, odds)
    else:
        row = pulled_rows(given, c, keys, pi, found, reach)
    tile = tiles_for(k, v, clusters)
    tile["BC"] = min(64 if (tile["BD"] + tile["BE"]) * k.element_size() <= 256 else 32, tile["BC"])
    shared = (
        c, k, v, keys.keep_or(c), found.bits, keys.first_or(c),
        row.dy, row.dm, row.delta, row.base2, row.near2, row.dn,
    )  # fmt: skip
    sizes = (
        clusters, m, d, e, h, h // hk, reach.scale * LOG2E, reach.scale, reach.per, reach.first, reach.step, words,
        parts,
    )  # fmt: skip
    strides = (*k.stride()[:3], *v.stride()[:3], *keys.keep_strides)
    flags: dict[str, Any] = {
        "HAS_KEEP": keys.keep is not None, "HAS_NEAR": has_near, "HAS_PARTS": keys.first is not None,
        "TANGENT": reach.tangent, "SLOPE": pi is not None, "PREFIX": reach.per > 0, "PRECISION": precision(k),
        "num_warps": 4,
    }  # fmt: skip
    dk, dv = new(b, hk, m, d, dtype=k.dtype), new(b, hk, m, e, dtype=v.dtype)
    strip = 0 if tile["BD"] * tile["BE"] * k.element_size() <= WHOLE_SLOPE else 32
    key_tiles = cdiv(m, tile["BM"]) + (2 * (parts + 1) if keys.first is not None else 0)
    launch(
        coarse_bwd_kv_kernel, (key_tiles, b * hk), (*shared, row.amount, row.per_key, row.slope, dk, dv),
        (*sizes, *strides), BP=power(parts + 1, least=1), BV=strip,
        **flags | tile | {"num_stages": 2 if narrow(k, v) else 1},
    )  # fmt: skip
    row_tiles = cdiv(clusters, tile["BC"])
    splits, stretch = cuts(m, lead * row_tiles, tile["BM"], parts)
    part, dc = new(lead, splits * parts, clusters, d), new(b, h, clusters, d, dtype=dtype)
    launch(
        coarse_bwd_c_kernel, (splits * parts, row_tiles, lead), (*shared, row.amount, row.per_key, part),
        (*sizes, splits, stretch, *strides), **flags, **tile,
    )  # fmt: skip
    feet = given.feet or Feet(part, part)
    launch(
        dc_kernel, (clusters, lead), (part, given.lse, found.mean_key, *feet, dc),
        (clusters, d, splits * parts, parts, feet.listed.shape[1], reach.scale),
        FOOT=foot, HAS_FEET=given.feet is not None, BS=min(32, power(splits * parts, least=1)),
        BP=min(32, power(parts, least=1)), BF=16, BD=tile["BD"], num_warps=1 if splits * parts < 16 else 4,
    )  # fmt: skip
    return dc, dk, dv
