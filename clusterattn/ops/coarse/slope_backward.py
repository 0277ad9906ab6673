"""What the gradient D of the slope asks of keys, weights and means. With x = k - kappa, y = v - nu (see slope.py; of a
part, kappa and nu are the same wherever they are taken off):

of a key      x^T D y, and through omega its weights
of a row      its mean under the weights of the part, which moves the parts' shares
of the means  -pi a D ybar for the mean key, -pi a D^T xbar for the mean value
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._jit import THIN, in_turn, jit, narrow, power, precision, tl
from .._launch import cdiv, launch
from .arrange import Arranged
from .kernels import LOG2E, Far
from .near import near_down
from .reference import Reach
from .slope import _sizes, middle, own, part_of, rows_at

WHOLE_SLOPE = 1 << 15  # bytes of the slope's gradient that are held at once


def strip(d: int, e: int, size: int) -> int:
    """So many columns of the slope's gradient, and then rows, are held at once; 0: all."""
    return 0 if d * e * size <= WHOLE_SLOPE else 32


@jit
def feet(K, MEAN, near_it, stride, columns, width, OWN: tl.constexpr):
    """What is taken off: the rows of keys near each, or one mean key for all."""
    if OWN:
        found = rows_at(K, near_it, stride, columns, width)
    else:
        found = tl.load(MEAN + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    return found


@jit
def pull_kernel(
    C, K, V, KEEP, FIRST, BITS, MEAN, OUT, LEVEL, D_SLOPE, PULL, OMEGA, PART,
    rows, few, parts, m, d, e, heads, group, scale, words, splits, stretch, skb, skh, skm, svb, svh, svm, seb, seh,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, OWN: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of each key PULL (lead 32 words), x^T D y, and OMEGA (the same), its weight in the slope. PART (lead splits few):
    the sum of PULL over a stretch of keys, under their weights for each cluster. OWN: see own; BV: see strip."""
    in_turn()
    split, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    dims, values, tile, row = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BM), tl.arange(0, BC)
    wide, long, here = dims < d, values < e, row < few
    k_base, v_base = K + batch * skb + head * skh, V + batch * svb + head * svh
    first_of = FIRST + (batch * (heads // group) + head) * (parts + 2)
    foot_k, foot_v = MEAN + lead * parts * rows * d, OUT + lead * parts * rows * e
    kappa = tl.load(foot_k + dims, mask=wide, other=0.0).to(tl.float32)
    c = tl.load(C + lead * rows * d + row[:, None] * d + dims[None, :], mask=here[:, None] & wide[None, :], other=0.0)
    level = tl.load(LEVEL + lead * rows + row, mask=here, other=float("inf"))
    slope = D_SLOPE + lead * d * e
    if BV == 0:
        nu = tl.load(foot_v + values, mask=long, other=0.0).to(tl.float32)
        whole = tl.load(slope + dims[:, None] * e + values[None, :], mask=wide[:, None] & long[None, :], other=0.0)
    total = tl.zeros((BM, BC), tl.float32)
    for start in tl.range(split * stretch, tl.minimum((split + 1) * stretch, m), BM, num_stages=STAGES):
        key = start + tile
        there, at = key < m, tl.full((), start, tl.int64)
        k_at, v_at = k_base + at * skm, v_base + at * svm
        seen = there
        if HAS_KEEP:
            seen = seen & (tl.load(KEEP + batch * seb + head * seh + key, mask=there, other=0) != 0)
        k = tl.load(k_at + tile[:, None] * skm + dims[None, :], mask=there[:, None] & wide[None, :], other=0.0)
        of_k, near_it = kappa[None, :], key
        if OWN:
            near_it = middle(first_of, part_of(first_of, key, parts, 32), m)
            of_k = rows_at(k_base, near_it, skm, dims, d)
        x = (k.to(tl.float32) - of_k).to(k.dtype)
        w = tl.exp2(tl.dot(k, tl.trans(c), input_precision=PRECISION) * scale - level[None, :])
        gone = tl.broadcast_to((~seen)[:, None], (BM, BC))
        if HAS_NEAR:
            gone = gone | near_down(BITS, lead, row, rows, words, start, tile)
        w = tl.where(gone, 0.0, w)
        if BV == 0:
            v = tl.load(v_at + tile[:, None] * svm + values[None, :], mask=there[:, None] & long[None, :], other=0.0)
            of_v = nu[None, :]
            if OWN:
                of_v = rows_at(v_base, near_it, svm, values, e)
            y = v.to(tl.float32) - of_v
            pull = tl.sum(tl.dot(x, whole, input_precision=PRECISION) * y, 1)
        else:
            pull = tl.zeros((BM,), tl.float32)
            for first in range(0, e, BV):
                column = first + tl.arange(0, BV)
                inside = column < e
                v = tl.load(
                    v_at + tile[:, None] * svm + column[None, :], mask=there[:, None] & inside[None, :], other=0.0
                )
                y = v.to(tl.float32) - feet(v_base, foot_v, near_it, svm, column, e, OWN)
                block = tl.load(
                    slope + dims[:, None] * e + column[None, :], mask=wide[:, None] & inside[None, :], other=0.0
                )
                pull += tl.sum(tl.dot(x, block, input_precision=PRECISION) * y, 1)
        tl.store(PULL + lead * words * 32 + key, pull, mask=key < words * 32)
        tl.store(OMEGA + lead * words * 32 + key, tl.sum(w, 1), mask=key < words * 32)
        total += w * pull[:, None]
    tl.store(PART + (lead * splits + split) * few + row, tl.sum(total, 0), mask=here)


@jit
def pulled(
    MEAN, OUT, K, V, MEAN_FOOT, OUT_FOOT, D_SLOPE, at, near_it, there, mean, out, amount, d_out, d_mean, d, e, skm, svm,
    OWN: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the rows ``at`` with what the slope asks of them, and xbar^T D ybar; BV: see strip. For kappa
    and nu see feet."""
    dims, values = tl.arange(0, BD), tl.arange(0, BE)
    wide, long = dims < d, values < e
    y = out.to(tl.float32) - feet(V, OUT_FOOT, near_it, svm, values, e, OWN)
    if BV == 0:
        x = (mean.to(tl.float32) - feet(K, MEAN_FOOT, near_it, skm, dims, d, OWN)).to(mean.dtype)
        slope = tl.load(D_SLOPE + dims[:, None] * e + values[None, :], mask=wide[:, None] & long[None, :], other=0.0)
        moved = tl.dot(x, slope, input_precision=PRECISION)
        d_out -= amount[:, None] * moved
        across = tl.sum(moved * y, 1)
        turned = tl.dot(y.to(out.dtype), tl.trans(slope), input_precision=PRECISION)
    else:
        strip = tl.arange(0, BV)
        moved, turned = tl.zeros(out.shape, tl.float32), tl.zeros(mean.shape, tl.float32)
        for first in range(0, d, BV):
            inside = first + strip < d
            x = tl.load(
                MEAN + at[:, None] * d + first + strip[None, :], mask=there[:, None] & inside[None, :], other=0.0
            )
            x = x.to(tl.float32) - feet(K, MEAN_FOOT, near_it, skm, first + strip, d, OWN)
            slope = tl.load(
                D_SLOPE + (first + strip[:, None]) * e + values[None, :], mask=inside[:, None] & long[None, :],
                other=0.0,
            )  # fmt: skip
            moved += tl.dot(x.to(mean.dtype), slope, input_precision=PRECISION)
        d_out -= amount[:, None] * moved
        across = tl.sum(moved * y, 1)
        for first in range(0, e, BV):
            inside = first + strip < e
            of_strip = tl.load(
                OUT + at[:, None] * e + first + strip[None, :], mask=there[:, None] & inside[None, :], other=0.0
            )
            of_strip = of_strip.to(tl.float32) - feet(V, OUT_FOOT, near_it, svm, first + strip, e, OWN)
            slope = tl.load(
                D_SLOPE + dims[:, None] * e + first + strip[None, :], mask=wide[:, None] & inside[None, :], other=0.0
            )
            turned += tl.dot(of_strip.to(out.dtype), tl.trans(slope), input_precision=PRECISION)
    return d_out, d_mean - amount[:, None] * turned, across


@jit
def share_kernel(
    PART, ACROSS, AMOUNT, PI, DELTA, rows, few, parts, splits, BP: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """The shares of a cluster's parts sum to one: what they ask for together (the keys by PART, less the means by
    ACROSS), each gives back by its share."""
    in_turn()
    lead, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BC + tl.arange(0, BC)
    here, part = row < few, tl.arange(0, BP)
    total = tl.zeros((BC,), tl.float32)
    for first in range(0, splits, BP):
        mask = (first + part < splits)[:, None] & here[None, :]
        at = (lead * splits + first + part)[:, None] * few + row[None, :]
        total += tl.sum(tl.load(PART + at, mask=mask, other=0.0), 0)
    for first in range(0, parts, BP):
        mask = (first + part < parts)[:, None] & here[None, :]
        at = (lead * parts + first + part)[:, None] * few + row[None, :]
        total -= tl.sum(tl.load(ACROSS + at, mask=mask, other=0.0), 0)
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


@dataclass(frozen=True)
class Pulls:
    """Of each key (b*h m, in whole words of the bit mask: their loads are wide), where there is a slope."""

    pull: Tensor  # x^T D y
    omega: Tensor
    slope: Tensor  # (b*h d e): D, in the keys' dtype
    own: bool  # of each part kappa and nu of its own were taken off


def pulls(
    slope: Tensor, c: Tensor, keys: Arranged, pi: Tensor, level: Tensor, across: Tensor, row: Rows, found: Far,
    reach: Reach,
) -> Pulls:  # fmt: skip
    """c in the keys' dtype; level: see level_kernel; across (b*h p few): pi a xbar^T D ybar. Changes row.delta."""
    k, v, parts = keys.k, keys.v, reach.parts
    (b, h, clusters, d), (hk, m, e) = c.shape, v.shape[1:]
    lead, few, tile = b * h, across.shape[2], _sizes(keys)
    splits = max(1, min(cdiv(264, lead), cdiv(m, tile["BM"])))  # two programs to each multiprocessor
    stretch = cdiv(cdiv(m, splits), tile["BM"]) * tile["BM"]
    splits = cdiv(m, stretch)
    pull, omega = torch.empty(2, lead, cdiv(m, 32) * 32, dtype=torch.float32, device=k.device)
    part = torch.empty(lead, splits, few, dtype=torch.float32, device=k.device)
    launch(
        pull_kernel, (splits, lead),
        (c, k, v, keys.keep_or(c), keys.first_or(c), found.bits, found.mean_key, found.out, level, slope, pull, omega,
        part),
        (clusters, few, parts, m, d, e, h, h // hk, reach.scale * LOG2E, cdiv(m, 32), splits, stretch,
        *k.stride()[:3], *v.stride()[:3], *keys.keep_strides),
        HAS_KEEP=keys.keep is not None, HAS_NEAR=found.near_at.shape[-1] > 0,
        OWN=own(keys, parts), BV=strip(tile["BD"], tile["BE"], k.element_size()), BC=power(few, THIN),
        PRECISION=precision(k),
        num_warps=8 if tile["BD"] > 64 or k.element_size() > 2 else 4, STAGES=3 if narrow(k, v) else 1, **tile,
    )  # fmt: skip
    launch(
        share_kernel, (cdiv(few, 16), lead), (part, across, row.amount, pi.float().contiguous(), row.delta),
        (clusters, few, parts, splits), BP=64, BC=16, num_warps=4,
    )  # fmt: skip
    return Pulls(pull, omega, slope, own(keys, parts))
