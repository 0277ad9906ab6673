"""Gradients of centroid attention: the weights are computed anew, once with the keys standing still and once with the
centroids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._jit import THIN, in_turn, jit, narrow, power, precision, registers, tl
from .._launch import cdiv, launch, stacked
from .arrange import Arranged
from .kernels import LOG2E, Far, _stretch, cuts, tiles_for
from .near import _limit, outside
from .reference import Reach
from .slope import middle
from .slope_backward import Pulls, Rows, strip


@jit
def prepare_kernel(
    D_OUT, D_MEAN, D_LSE, D_NEAR, OUT, MEAN, LSE, NEAR_LSE, DY, DM, DELTA, BASE2, NEAR2, DN, total, d, e,
    TANGENT: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_D_LSE: tl.constexpr, HAS_D_NEAR: tl.constexpr,
    ODDS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What backward wants of each row: gradients in the keys' dtype; delta; logs in base 2, 0 where nothing was seen.
    ODDS: the gradient of the far lse is that of far against near."""
    in_turn()
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    dims, values, here = tl.arange(0, BD), tl.arange(0, BE), row < total
    inside, across = here[:, None] & (values < e)[None, :], here[:, None] & (dims < d)[None, :]
    dy = tl.load(D_OUT + row[:, None] * e + values[None, :], mask=inside, other=0.0)
    dl = tl.zeros((BR,), tl.float32)
    if HAS_D_LSE:
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
    in_turn()
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
def within(index, count, EVEN: tl.constexpr):
    """Which rows or columns of a tile are there; EVEN: all, and the compiler knows."""
    there = index < count
    if EVEN:
        there = tl.full(index.shape, True, tl.int1)
    return there


@jit
def _near_words(BITS, lead, row, here, rows, words, first):
    """The words of near keys of two times 32 keys from ``first`` on; the last is read twice."""
    word = first // 32
    place = BITS + (lead * words + word) * rows
    following = place + tl.minimum(words - 1 - word, 1) * rows
    return tl.load(place + row, mask=here, other=0), tl.load(following + row, mask=here, other=0)


@jit
def _bits(low, high, tile):
    """Rows of two words, down, and a tile of keys, across: whose bit is set."""
    word = tl.where((tile < 32)[None, :], low[:, None], high[:, None])
    return (word & (1 << (tile % 32))[None, :]) != 0


@jit
def _slope_share(
    k, v, K, V, FOOT_K, FOOT_V, D_SLOPE, omega, at, here, d, e, skm, svm, BV: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the slope asks of keys and values by their weights in it, which come last: they are small, and would leave
    half precision few digits. BV: see strip."""
    dims, values = tl.arange(0, BD), tl.arange(0, BE)
    wide, long = dims < d, values < e
    if BV == 0:
        kappa = tl.load(FOOT_K + dims, mask=wide, other=0.0).to(tl.float32)
        nu = tl.load(FOOT_V + values, mask=long, other=0.0).to(tl.float32)
        slope = tl.load(D_SLOPE + dims[:, None] * e + values[None, :], mask=wide[:, None] & long[None, :], other=0.0)
        x, y = (k.to(tl.float32) - kappa[None, :]).to(k.dtype), (v.to(tl.float32) - nu[None, :]).to(v.dtype)
        dk = tl.dot(y, tl.trans(slope), input_precision=PRECISION)
        dv = tl.dot(x, slope, input_precision=PRECISION)
    else:
        strip = tl.arange(0, BV)
        dk, dv = tl.zeros(k.shape, tl.float32), tl.zeros(v.shape, tl.float32)
        for column in range(0, e, BV):
            inside = column + strip < e
            y = tl.load(V + at * svm + column + strip[None, :], mask=here[:, None] & inside[None, :], other=0.0)
            nu = tl.load(FOOT_V + column + strip, mask=inside, other=0.0).to(tl.float32)
            slope = tl.load(
                D_SLOPE + dims[:, None] * e + column + strip[None, :], mask=wide[:, None] & inside[None, :], other=0.0
            )
            y = (y.to(tl.float32) - nu[None, :]).to(v.dtype)
            dk += tl.dot(y, tl.trans(slope), input_precision=PRECISION)
        for line in range(0, d, BV):
            inside = line + strip < d
            x = tl.load(K + at * skm + line + strip[None, :], mask=here[:, None] & inside[None, :], other=0.0)
            kappa = tl.load(FOOT_K + line + strip, mask=inside, other=0.0).to(tl.float32)
            slope = tl.load(
                D_SLOPE + (line + strip[:, None]) * e + values[None, :], mask=inside[:, None] & long[None, :], other=0.0
            )
            x = (x.to(tl.float32) - kappa[None, :]).to(k.dtype)
            dv += tl.dot(x, slope, input_precision=PRECISION)
    return dk * omega[:, None], dv * omega[:, None]


@jit
def coarse_bwd_kv_kernel(
    C, K, V, KEEP, BITS, ORDER, FIRST, DY, DM, DELTA, LSE, NEAR_LSE, D_NEAR, AMOUNT, PULL, OMEGA, D_SLOPE, MEAN, OUT,
    DK, DV,
    rows, m, d, e, heads, group, scale, natural_scale, per, first, step, words, parts,
    skb, skh, skm, svb, svh, svm, seb, seh,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_PARTS: tl.constexpr, TANGENT: tl.constexpr,
    SLOPE: tl.constexpr, OWN: tl.constexpr, PREFIX: tl.constexpr, EVEN: tl.constexpr, BP: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the keys of one part; their gradients go to where they came from. SLOPE (one block): with what the
    gradient of the slope asks of them; OWN, BV: see pull_kernel. EVEN: tiles of centroids, their keys and values are
    full."""
    in_turn()
    place = tl.program_id(1).to(tl.int64)
    kv_heads = heads // group
    batch, kv_head = place // kv_heads, place % kv_heads
    part, start, begin, end, seeing = 0, tl.program_id(0) * BM, 0, m, rows
    if HAS_PARTS:
        part, start, begin, end = _part_of(FIRST, place, parts, tl.program_id(0), BP, BM)
        # keys of no part (padding) are nobody's: their gradients are 0; and past the last tile there is nothing to do
        seeing = tl.where((part < parts) & (begin < end), rows, 0)
    tile, dims, values = tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    key, wide, long = start + tile, within(dims, d, EVEN), within(values, e, EVEN)
    here, at, mine = key < m, key.to(tl.int64)[:, None], (key >= begin) & (key < end)
    k_base, v_base = K + batch * skb + kv_head * skh, V + batch * svb + kv_head * svh
    k = tl.load(k_base + at * skm + dims[None, :], mask=here[:, None] & wide[None, :], other=0.0)
    v = tl.load(v_base + at * svm + values[None, :], mask=here[:, None] & long[None, :], other=0.0)
    to = at
    if HAS_PARTS:
        to = tl.load(ORDER + place * m + key, mask=here, other=0).to(tl.int64)[:, None]
    keep = mine
    if HAS_KEEP:
        keep = keep & (tl.load(KEEP + batch * seb + kv_head * seh + key, mask=here, other=0) != 0)
    # who is left out, as two words: with the near keys' words they are one test
    gone = tl.where(keep, 0, 1 << (tile % 32))
    gone_low, gone_high = tl.sum(tl.where(tile < 32, gone, 0), 0), tl.sum(tl.where(tile < 32, 0, gone), 0)
    dk, dv = tl.zeros((BM, BD), tl.float32), tl.zeros((BM, BE), tl.float32)
    for one in range(group):
        lead = batch * heads + kv_head * group + one
        far_row = (lead * parts + part) * rows
        pull = tl.zeros((BM,), tl.float32)
        if SLOPE:
            pull = tl.load(PULL + lead * words * 32 + key, mask=key < words * 32, other=0.0)
            omega = tl.load(OMEGA + lead * words * 32 + key, mask=key < words * 32, other=0.0)
            if OWN:
                near_it = middle(FIRST + place * (parts + 2), part, m).to(tl.int64)
                foot_k, foot_v = k_base + near_it * skm, v_base + near_it * svm
            else:
                foot_k, foot_v = MEAN + lead * parts * rows * d, OUT + lead * parts * rows * e
            of_k, of_v = _slope_share(
                k, v, k_base, v_base, foot_k, foot_v, D_SLOPE + lead * d * e, omega, at, here, d, e, skm, svm,
                BV, BD, BE, PRECISION,
            )  # fmt: skip
            dk += of_k
            dv += of_v
        for of in range(0, seeing, BC):
            row = of + tl.arange(0, BC)
            there = within(row, rows, EVEN)
            of_d, of_e = there[:, None] & wide[None, :], there[:, None] & long[None, :]
            c = tl.load(C + lead * rows * d + row[:, None] * d + dims[None, :], mask=of_d, other=0.0)
            dy = tl.load(DY + far_row * e + row[:, None] * e + values[None, :], mask=of_e, other=0.0)
            lse = tl.load(LSE + far_row + row, mask=there, other=0.0)
            delta = tl.load(DELTA + far_row + row, mask=there, other=0.0)
            # centroids down, keys across: what belongs to a row is a number or two for each thread
            # (rows that are not there have no gradients: whatever they see, nothing comes of it)
            s = tl.dot(c, tl.trans(k), input_precision=PRECISION) * scale
            dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
            if TANGENT:
                dm = tl.load(DM + far_row * d + row[:, None] * d + dims[None, :], mask=of_d, other=0.0)
                dp += tl.dot(dm, tl.trans(k), input_precision=PRECISION)
            low, high = gone_low + tl.zeros((BC,), tl.int32), gone_high + tl.zeros((BC,), tl.int32)
            if HAS_NEAR:
                near_low, near_high = _near_words(BITS, lead, row, there, rows, words, start)
                low, high = near_low | gone_low, near_high | gone_high
            p = tl.where(_bits(low, high, tile), 0.0, tl.exp2(s - lse[:, None]))
            if PREFIX:
                seen = key[None, :] < _limit(row, m, per, first, step)[:, None]
                p = tl.where(seen, p, 0.0)
            if SLOPE:
                dp += tl.load(AMOUNT + far_row + row, mask=there, other=0.0)[:, None] * pull[None, :]
            ds = p * (dp - delta[:, None])
            if HAS_NEAR and not TANGENT:
                near = _bits(near_low & ~gone_low, near_high & ~gone_high, tile)
                if PREFIX:
                    near = near & seen
                near_lse = tl.load(NEAR_LSE + lead * rows + row, mask=there, other=0.0)
                d_near = tl.load(D_NEAR + lead * rows + row, mask=there, other=0.0)
                ds += tl.where(near, tl.exp2(s - near_lse[:, None]), 0.0) * d_near[:, None]
            turned = tl.trans(p.to(v.dtype))
            dv += tl.dot(turned, dy, input_precision=PRECISION)
            if TANGENT:
                dk += tl.dot(turned, dm, input_precision=PRECISION)
            dk += tl.dot(tl.trans((ds * natural_scale).to(k.dtype)), c, input_precision=PRECISION)
    to += place * m
    tl.store(DK + to * d + dims[None, :], dk.to(DK.dtype.element_ty), mask=mine[:, None] & wide[None, :])
    tl.store(DV + to * e + values[None, :], dv.to(DV.dtype.element_ty), mask=mine[:, None] & long[None, :])


@jit
def coarse_bwd_c_kernel(
    C, K, V, KEEP, BITS, FIRST, LARGEST, DY, DM, DELTA, LSE, NEAR_LSE, D_NEAR, AMOUNT, PULL, DC,
    rows, m, d, e, heads, group, scale, natural_scale, per, first, step, words, parts, splits, stretch,
    skb, skh, skm, svb, svh, svm, seb, seh,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_PARTS: tl.constexpr, TANGENT: tl.constexpr,
    SLOPE: tl.constexpr, PREFIX: tl.constexpr, EVEN: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The programs are those of coarse_fwd_kernel."""
    in_turn()
    split, part, lead = tl.program_id(2) % splits, tl.program_id(2) // splits, tl.program_id(0).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    if HAS_PARTS:
        part = tl.load(LARGEST + (batch * (heads // group) + head) * parts + part)
    row, dims, values = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BD), tl.arange(0, BE)
    here, wide, long = within(row, rows, EVEN), within(dims, d, EVEN), within(values, e, EVEN)
    mine, far_row, tile = lead * rows + row, (lead * parts + part) * rows + row, tl.arange(0, BM)
    of_d, of_e = here[:, None] & wide[None, :], here[:, None] & long[None, :]
    c = tl.load(C + mine[:, None] * d + dims[None, :], mask=of_d, other=0.0)
    dy = tl.load(DY + far_row[:, None] * e + values[None, :], mask=of_e, other=0.0)
    lse, delta = tl.load(LSE + far_row, mask=here, other=0.0), tl.load(DELTA + far_row, mask=here, other=0.0)
    if TANGENT:
        dm = tl.load(DM + far_row[:, None] * d + dims[None, :], mask=of_d, other=0.0)
    if SLOPE:
        amount = tl.load(AMOUNT + far_row, mask=here, other=0.0)
    if HAS_NEAR and not TANGENT:
        near_lse = tl.load(NEAR_LSE + mine, mask=here, other=0.0)
        d_near = tl.load(D_NEAR + mine, mask=here, other=0.0)
    begin, end, low, stop = _stretch(
        FIRST, batch * (heads // group) + head, part, parts, m, split, splits, stretch, HAS_PARTS, BM
    )
    limit = row
    if PREFIX:
        limit = tl.minimum(_limit(row, m, per, first, step), end)
        stop = tl.minimum(stop, tl.max(tl.where(here, limit, 0)))
    k_base, v_base, pull_at = K + batch * skb + head * skh, V + batch * svb + head * svh, PULL + lead * words * 32
    k_tile, v_tile = tile[:, None] * skm + dims[None, :], tile[:, None] * svm + values[None, :]
    dc = tl.zeros((BC, BD), tl.float32)
    for start in range(low, stop, BM):
        key = start + tile
        there, at = key < m, tl.full((), start, tl.int64)
        k = tl.load(k_base + at * skm + k_tile, mask=there[:, None] & wide[None, :], other=0.0)
        v = tl.load(v_base + at * svm + v_tile, mask=there[:, None] & long[None, :], other=0.0)
        s = tl.dot(c, tl.trans(k), input_precision=PRECISION) * scale
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        if TANGENT:
            dp += tl.dot(dm, tl.trans(k), input_precision=PRECISION)
        gone_low, gone_high = outside(start, begin, end), outside(start + 32, begin, end)
        first_word, next_word = gone_low + tl.zeros((BC,), tl.int32), gone_high + tl.zeros((BC,), tl.int32)
        if HAS_NEAR:
            near_low, near_high = _near_words(BITS, lead, row, here, rows, words, start)
            first_word, next_word = near_low | gone_low, near_high | gone_high
        p = tl.where(_bits(first_word, next_word, tile), 0.0, tl.exp2(s - lse[:, None]))
        seen = tl.full((BC, BM), True, tl.int1)
        if HAS_KEEP:
            seen = seen & (tl.load(KEEP + batch * seb + head * seh + key, mask=there, other=0) != 0)[None, :]
        if PREFIX:
            seen = seen & (key[None, :] < limit[:, None])
        p = tl.where(seen, p, 0.0)
        if SLOPE:
            dp += amount[:, None] * tl.load(pull_at + key, mask=key < words * 32, other=0.0)[None, :]
        ds = p * (dp - delta[:, None])
        if HAS_NEAR and not TANGENT:
            near = seen & _bits(near_low & ~gone_low, near_high & ~gone_high, tile)
            ds += tl.where(near, tl.exp2(s - near_lse[:, None]), 0.0) * d_near[:, None]
        dc += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    place = ((lead * splits + split) * parts + part) * rows + row
    tl.store(DC + place[:, None] * d + dims[None, :], dc * natural_scale, mask=of_d)


class Feet(NamedTuple):
    """Gradients of the centroids, where the slope stands, turn by turn."""

    listed: Tensor  # (b*h turns d)
    first: Tensor  # (b*h c+2): where those of each centroid begin


@dataclass(frozen=True)
class Given:
    """Gradients of what forward found, (b*h p c ...)."""

    out: Tensor
    mean_key: Tensor
    lse: Tensor | None
    near_lse: Tensor | None  # (b*h c)


def prepared(given: Given, keys: Arranged, found: Far, reach: Reach, *, odds: bool = False) -> Rows:
    """odds: the gradient of the far lse is that of far lse less near lse."""
    k, v = keys.k, keys.v
    d, e, count, has_near = k.shape[3], v.shape[3], found.lse.numel(), reach.top > 0 and not reach.tangent

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=k.device)

    dy, dm = new(count, e, dtype=v.dtype), new(count, d if reach.tangent else 0, dtype=k.dtype)
    delta, base2, near2, dn = stacked(4, count, k.device)
    launch(
        prepare_kernel, (cdiv(count, 8),),
        (given.out.contiguous(), given.mean_key.contiguous(), dn if given.lse is None else given.lse.contiguous(),
        dn if given.near_lse is None else given.near_lse.contiguous(), found.out, found.mean_key, found.lse,
        found.near_lse, dy, dm, delta, base2, near2, dn), (count, d, e),
        TANGENT=reach.tangent, HAS_NEAR=has_near, HAS_D_LSE=given.lse is not None,
        HAS_D_NEAR=given.near_lse is not None, ODDS=odds, BR=8, BD=power(d), BE=power(e), num_warps=4,
    )  # fmt: skip
    return Rows(dy, dm, delta, base2, near2, dn, delta)


def backward(
    row: Rows, c: Tensor, keys: Arranged, found: Far, reach: Reach, *,
    foot: Tensor | None = None, feet: Feet | None = None, pulls: Pulls | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dc (b h c d), and dk, dv where the keys came from. foot (b*h p c): the gradients of the far lse, where each is
    the foot of a tangent at the centroid."""
    k, v, parts = keys.k, keys.v, reach.parts
    (b, h, clusters, d), (hk, m, e) = c.shape, v.shape[1:]
    dtype, c = c.dtype, c.to(k.dtype).contiguous()
    tile = tiles_for(k, v, clusters)
    tile["BC"] = min(64 if (tile["BD"] + tile["BE"]) * k.element_size() <= 256 else 32, tile["BC"])
    bits = (c, k, v, keys.keep_or(c), found.bits)
    rows = (row.dy, row.dm, row.delta, row.base2, row.near2, row.dn, row.amount)
    sizes = (
        clusters, m, d, e, h, h // hk, reach.scale * LOG2E, reach.scale, reach.per, reach.first, reach.step,
        cdiv(m, 32), parts,
    )  # fmt: skip
    strides = (*k.stride()[:3], *v.stride()[:3], *keys.keep_strides)
    wide = (d, e) == (tile["BD"], tile["BE"])
    flags: dict[str, Any] = {
        "HAS_KEEP": keys.keep is not None, "HAS_NEAR": reach.top > 0, "HAS_PARTS": keys.first is not None,
        "TANGENT": reach.tangent, "SLOPE": pulls is not None, "PREFIX": reach.per > 0, "PRECISION": precision(k),
    }  # fmt: skip
    of_keys = (row.delta,) * 3 if pulls is None else (pulls.pull, pulls.omega, pulls.slope)
    row_tiles = cdiv(clusters, tile["BC"])
    splits, stretch = cuts(m, b * h * row_tiles, tile["BM"], parts)
    part = torch.empty(b * h, splits * parts, clusters, d, dtype=torch.float32, device=c.device)
    launch(
        coarse_bwd_c_kernel, (b * h, row_tiles, splits * parts),
        (*bits, keys.first_or(c), keys.largest_or(c), *rows, of_keys[0], part),
        (*sizes, splits, stretch, *strides), EVEN=wide and clusters % tile["BC"] == 0, num_warps=4, **flags, **tile,
        **registers(k, v),
    )  # fmt: skip
    dc = _added(part, foot, feet, found, reach, c.shape, dtype)
    del part  # before there are gradients of keys
    dk, dv = (torch.empty(b, hk, m, width, dtype=x.dtype, device=c.device) for width, x in ((d, k), (e, v)))
    if k.element_size() == 2 and tile["BD"] + tile["BE"] <= 256:
        tile["BC"] = min(64, power(clusters, THIN))  # a row of 64 centroids is what tensor cores take at once
    key_tiles = cdiv(m, tile["BM"]) + (2 * (parts + 1) if keys.first is not None else 0)
    launch(
        coarse_bwd_kv_kernel, (key_tiles, b * hk),
        (*bits, c if keys.order is None else keys.order, keys.first_or(c), *rows, *of_keys, found.mean_key,
        found.out, dk, dv),
        (*sizes, *strides), OWN=pulls is not None and pulls.own, BP=power(parts + 1, least=1),
        BV=strip(tile["BD"], tile["BE"], k.element_size()),
        EVEN=wide and clusters % tile["BC"] == 0, **flags | tile | {"num_stages": 3 if narrow(k, v) else 1},
        num_warps=4 if tile["BM"] * (tile["BD"] + tile["BE"]) <= 128**2 else 8,  # dk and dv stay in registers
    )  # fmt: skip
    return dc, dk, dv


def _added(
    part: Tensor, foot: Tensor | None, feet: Feet | None, found: Far, reach: Reach, shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """dc (b h c d) of its parts (b*h s c d)."""
    (b, h, clusters, d), splits, parts = shape, part.shape[1], reach.parts
    dc, feet_of = torch.empty(shape, dtype=dtype, device=part.device), feet or Feet(part, part)
    launch(
        dc_kernel, (clusters, b * h), (part, part if foot is None else foot, found.mean_key, *feet_of, dc),
        (clusters, d, splits, parts, feet_of.listed.shape[1], reach.scale),
        FOOT=foot is not None, HAS_FEET=feet is not None, BS=min(64, power(splits, least=1)),
        BP=min(64, power(parts, least=1)), BF=16, BD=power(d), num_warps=1 if splits < 16 else 4,
    )  # fmt: skip
    return dc
