"""What the gradient D of the slope asks of keys, weights and means. With x = k - kappa, y = v - nu (see slope.py):

of a key      x^T D y, and through omega its weights
of a row      its mean under the weights of the part, which moves the parts' shares
of the means  -pi a D ybar for the mean key, -pi a D^T xbar for the mean value
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._jit import THIN, jit, power, precision, tl
from .._launch import cdiv, launch
from .arrange import Arranged
from .kernels import LOG2E, Far, _stretch, cuts, tiles_for
from .near import near_across
from .reference import SLOPE_CLUSTERS, Reach
from .slope import levels

if TYPE_CHECKING:
    from .backward_kernels import Given


@jit
def pull_kernel(
    K, V, D_SLOPE, PULL, m, d, e, heads, group, skb, skh, skm, svb, svh, svm,
    BM: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PULL (lead m): x^T D y of every key."""
    lead, key = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    dims, batch, head = tl.arange(0, BD), lead // heads, (lead % heads) // group
    wide, here, at = dims < d, key < m, key.to(tl.int64)[:, None]
    k_base, v_base = K + batch * skb + head * skh, V + batch * svb + head * svh
    k = tl.load(k_base + at * skm + dims[None, :], mask=here[:, None] & wide[None, :], other=0.0)
    x = (k.to(tl.float32) - tl.load(k_base + dims, mask=wide, other=0.0).to(tl.float32)[None, :]).to(k.dtype)
    total = tl.zeros((BM,), tl.float32)
    for first in range(0, e, BV):
        values = first + tl.arange(0, BV)
        long = values < e
        v = tl.load(v_base + at * svm + values[None, :], mask=here[:, None] & long[None, :], other=0.0)
        y = v.to(tl.float32) - tl.load(v_base + values, mask=long, other=0.0).to(tl.float32)[None, :]
        inside = wide[:, None] & long[None, :]
        slope = tl.load(D_SLOPE + (lead * d + dims[:, None]) * e + values[None, :], mask=inside, other=0.0)
        total += tl.sum(tl.dot(x, slope.to(k.dtype), input_precision=PRECISION) * y, 1)
    tl.store(PULL + lead * m + key, total, mask=here)


@jit
def mean_pull_kernel(
    C, K, KEEP, BITS, FIRST, LSE, PULL, PART,
    rows, few, m, d, heads, group, scale, words, parts, splits, stretch, skb, skh, skm, seb, seh,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_PARTS: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PART (lead splits p few): the mean of PULL under the weights of each part, of the first few clusters."""
    split, part, lead = tl.program_id(0) % splits, tl.program_id(0) // splits, tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    row, dims = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BD)
    here, far_row = row < few, (lead * parts + part) * rows + row
    c = tl.load(
        C + (lead * rows + row)[:, None] * d + dims[None, :], mask=here[:, None] & (dims[None, :] < d), other=0.0
    )
    lse = tl.load(LSE + far_row, mask=here, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
    begin, end, low, stop = _stretch(
        FIRST, batch * (heads // group) + head, part, parts, m, split, splits, stretch, HAS_PARTS, BM
    )
    total = tl.zeros((BC,), tl.float32)
    for start in range(low, stop, BM):
        key = start + tl.arange(0, BM)
        at = key.to(tl.int64)[:, None]
        k = tl.load(
            K + batch * skb + head * skh + at * skm + dims[None, :], mask=(at < m) & (dims[None, :] < d), other=0.0
        )
        s = tl.dot(c, tl.trans(k), input_precision=PRECISION) * scale
        seen = ((key >= begin) & (key < end))[None, :] & here[:, None]
        if HAS_KEEP:
            seen = seen & (tl.load(KEEP + batch * seb + head * seh + key, mask=key < m, other=0) != 0)[None, :]
        if HAS_NEAR:
            seen = seen & (~near_across(BITS, lead, row, rows, words, start, tl.arange(0, BM)))
        pull = tl.load(PULL + lead * m + key, mask=key < m, other=0.0)
        total += tl.sum(tl.where(seen, tl.exp2(s - lse[:, None]), 0.0) * pull[None, :], 1)
    tl.store(PART + ((lead * splits + split) * parts + part) * few + row, total, mask=here)


@jit
def pulled_rows_kernel(
    D_OUT, D_MEAN, D_LSE, OUT, MEAN, LSE, K, V, D_SLOPE, LEVEL, MEAN_PULL, DY, DM, DELTA, BASE2, AMOUNT, OF_SHARE,
    rows, few, parts, splits, d, e, heads, group, skb, skh, svb, svh,
    BC: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """prepare_kernel with what the slope adds: a tile of the clusters of one part.

    AMOUNT (lead p c) = pi a. OF_SHARE (lead p few) = a times the gradient of a: of these and DELTA share_kernel makes
    what is left. Clusters past the first few have no part in the slope."""
    part, lead = tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    begin = tl.program_id(0) * BC
    row, dims = begin + tl.arange(0, BC), tl.arange(0, BD)
    here, wide, place = row < rows, dims < d, (lead * parts + part) * rows + row
    sloped, of_d = row < few, here[:, None] & wide[None, :]
    lse2 = tl.load(LSE + place, mask=here, other=0.0) * 1.4426950408889634
    level = tl.load(LEVEL + lead * rows + row, mask=sloped & here, other=float("inf"))
    amount = tl.exp2(lse2 - level)
    mean = tl.load(MEAN + place[:, None] * d + dims[None, :], mask=of_d, other=0.0)
    kappa = tl.load(K + batch * skb + head * skh + dims, mask=wide, other=0.0).to(tl.float32)
    x, turned = mean - kappa[None, :], tl.zeros((BC, BD), tl.float32)  # D ybar
    delta, across = -tl.load(D_LSE + place, mask=here, other=0.0), tl.zeros((BC,), tl.float32)  # xbar^T D ybar
    for first in range(0, e, BV):
        values = first + tl.arange(0, BV)
        long = values < e
        of_e = here[:, None] & long[None, :]
        out = tl.load(OUT + place[:, None] * e + values[None, :], mask=of_e, other=0.0)
        dy = tl.load(D_OUT + place[:, None] * e + values[None, :], mask=of_e, other=0.0)
        if begin < few:
            nu = tl.load(V + batch * svb + head * svh + values, mask=long, other=0.0).to(tl.float32)
            inside = wide[:, None] & long[None, :]
            slope = tl.load(D_SLOPE + (lead * d + dims[:, None]) * e + values[None, :], mask=inside, other=0.0)
            y = out - nu[None, :]
            turned += tl.dot(y, tl.trans(slope), input_precision=PRECISION)
            moved = tl.dot(x, slope, input_precision=PRECISION)
            across += tl.sum(moved * y, 1)
            dy -= amount[:, None] * moved
        delta += tl.sum(dy * out, 1)
        tl.store(DY + place[:, None] * e + values[None, :], dy.to(DY.dtype.element_ty), mask=of_e)
    dm = tl.load(D_MEAN + place[:, None] * d + dims[None, :], mask=of_d, other=0.0) - amount[:, None] * turned
    delta += tl.sum(dm * mean, 1) + amount * across
    tl.store(DM + place[:, None] * d + dims[None, :], dm.to(DM.dtype.element_ty), mask=of_d)
    tl.store(DELTA + place, delta, mask=here)
    tl.store(BASE2 + place, tl.where(lse2 == float("-inf"), 0.0, lse2), mask=here)
    tl.store(AMOUNT + place, amount, mask=here)
    if begin < few:
        mine = (lead * splits * parts + part) * few + row
        pull = tl.zeros((BC,), tl.float32)
        for split in range(splits):
            pull += tl.load(MEAN_PULL + mine + split * parts * few, mask=sloped, other=0.0)
        tl.store(OF_SHARE + (lead * parts + part) * few + row, amount * (pull - across), mask=sloped)


@jit
def share_kernel(OF_SHARE, AMOUNT, PI, DELTA, rows, few, parts, BP: tl.constexpr, BC: tl.constexpr):
    """The shares of a cluster's parts sum to one: what they ask for together, each gives back by its share."""
    lead, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BC + tl.arange(0, BC)
    here, part = row < few, tl.arange(0, BP)
    total = tl.zeros((BC,), tl.float32)
    for first in range(0, parts, BP):
        mask = (first + part < parts)[:, None] & here[None, :]
        at = (lead * parts + first + part)[:, None] * few + row[None, :]
        total += tl.sum(tl.load(OF_SHARE + at, mask=mask, other=0.0), 0)
    pi = tl.load(PI + lead * rows + row, mask=here, other=0.0)
    total = total / tl.where(pi > 0, pi, 1.0)
    for first in range(0, parts, BP):
        mask = (first + part < parts)[:, None] & here[None, :]
        at = (lead * parts + first + part)[:, None] * rows + row[None, :]
        amount = tl.load(AMOUNT + at, mask=mask, other=0.0)
        tl.store(DELTA + at, tl.load(DELTA + at, mask=mask, other=0.0) + amount * total[None, :], mask=mask)


@dataclass(frozen=True)
class Rows:
    """What backward wants of each row (b*h p c), see prepare_kernel; and of each key, where there is a slope."""

    dy: Tensor  # (rows e)
    dm: Tensor  # (rows d), or (rows 0)
    delta: Tensor
    base2: Tensor
    near2: Tensor
    dn: Tensor
    amount: Tensor  # pi a
    per_key: Tensor  # (b*h m): x^T D y
    slope: Tensor  # (b*h d e): D


def pulled_rows(given: Given, c: Tensor, keys: Arranged, pi: Tensor, found: Far, reach: Reach) -> Rows:
    """With the slope; c in the keys' dtype."""
    assert given.slope is not None
    k, v, parts, slope = keys.k, keys.v, reach.parts, given.slope
    (b, h, clusters, d), (hk, m, e) = c.shape, v.shape[1:]
    lead, few = b * h, min(clusters, SLOPE_CLUSTERS)
    tile = tiles_for(k, v, few)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=k.device)

    half = k.element_size() == 2  # a product of fp32 is three of tf32, with twice the bytes: smaller tiles
    columns = min(128 if half else 64, power(e, THIN))  # of the slope at once
    per_key, size = new(lead, m), 64 if half else 32
    launch(
        pull_kernel, (cdiv(m, size), lead), (k, v, slope, per_key),
        (m, d, e, h, h // hk, *k.stride()[:3], *v.stride()[:3]),
        BM=size, BD=tile["BD"], BV=columns, PRECISION=precision(k), num_warps=4, num_stages=1,
    )  # fmt: skip
    row_tiles = cdiv(few, tile["BC"])
    splits, stretch = cuts(m, lead * row_tiles, tile["BM"], parts)
    mean_pull = new(lead, splits, parts, few)
    launch(
        mean_pull_kernel, (splits * parts, row_tiles, lead),
        (c, k, keys.keep_or(c), found.bits, keys.first_or(c), found.lse, per_key, mean_pull),
        (clusters, few, m, d, h, h // hk, reach.scale * LOG2E, (m + 31) // 32, parts, splits, stretch,
        *k.stride()[:3], *keys.keep_strides),
        HAS_KEEP=keys.keep is not None, HAS_NEAR=found.near_at.shape[-1] > 0, HAS_PARTS=keys.first is not None,
        BC=tile["BC"], BM=tile["BM"], BD=power(d), PRECISION=precision(k), num_warps=4,
    )  # fmt: skip
    count = lead * parts * clusters
    dy, dm = new(count, e, dtype=v.dtype), new(count, d, dtype=k.dtype)
    delta, base2, amount = new(3, count)
    of_share, pi = new(lead, parts, few), pi.float().contiguous()
    size = min(32 if half else 16, power(clusters))
    launch(
        pulled_rows_kernel, (cdiv(clusters, size), parts, lead),
        (given.out, given.mean_key, given.lse, found.out, found.mean_key, found.lse, k, v, slope,
        levels(found.lse, pi), mean_pull, dy, dm, delta, base2, amount, of_share),
        (clusters, few, parts, splits, d, e, h, h // hk, *k.stride()[:2], *v.stride()[:2]),
        BC=size, BD=tile["BD"], BV=min(64 if half else 32, power(e, THIN)), PRECISION=precision(k), num_warps=4,
        num_stages=1,
    )  # fmt: skip
    launch(
        share_kernel, (cdiv(few, 16), lead), (of_share, amount, pi, delta), (clusters, few, parts),
        BP=min(64, power(parts, least=1)), BC=16, num_warps=4,
    )  # fmt: skip
    return Rows(dy, dm, delta, base2, base2, base2, amount, per_key, slope)
