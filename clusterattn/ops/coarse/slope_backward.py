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

from .._jit import jit, power, precision, tl
from .._launch import cdiv, launch
from .arrange import Arranged
from .kernels import LOG2E, Far, _near, _stretch, cuts, tiles_for
from .reference import Reach

if TYPE_CHECKING:
    from .backward_kernels import Given


@jit
def pull_kernel(
    K, V, D_SLOPE, PULL, m, d, e, heads, group, skb, skh, skm, svb, svh, svm,
    BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PULL (lead m): x^T D y of every key."""
    lead, key = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    dims, values, batch, head = tl.arange(0, BD), tl.arange(0, BE), lead // heads, (lead % heads) // group
    wide, long, here = dims < d, values < e, key < m
    k_base, v_base = K + batch * skb + head * skh, V + batch * svb + head * svh
    at = key.to(tl.int64)[:, None]
    k = tl.load(k_base + at * skm + dims[None, :], mask=here[:, None] & wide[None, :], other=0.0)
    v = tl.load(v_base + at * svm + values[None, :], mask=here[:, None] & long[None, :], other=0.0)
    x = (k.to(tl.float32) - tl.load(k_base + dims, mask=wide, other=0.0).to(tl.float32)[None, :]).to(k.dtype)
    y = v.to(tl.float32) - tl.load(v_base + values, mask=long, other=0.0).to(tl.float32)[None, :]
    slope = tl.load(
        D_SLOPE + (lead * d + dims[:, None]) * e + values[None, :], mask=wide[:, None] & long[None, :], other=0.0
    )
    turned = tl.dot(x, slope.to(k.dtype), input_precision=PRECISION)
    tl.store(PULL + lead * m + key, tl.sum(turned * y, 1), mask=here)


@jit
def mean_pull_kernel(
    C, K, KEEP, BITS, FIRST, LSE, PULL, PART,
    rows, m, d, heads, group, scale, words, parts, splits, stretch, skb, skh, skm, seb, seh,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_PARTS: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PART (lead splits p c): the mean of PULL under the weights of each part."""
    split, part, lead = tl.program_id(0) % splits, tl.program_id(0) // splits, tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    row, dims = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BD)
    here, far_row = row < rows, (lead * parts + part) * rows + row
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
            seen = seen & (~_near(BITS, lead, row, rows, words, start, key))
        pull = tl.load(PULL + lead * m + key, mask=key < m, other=0.0)
        total += tl.sum(tl.where(seen, tl.exp2(s - lse[:, None]), 0.0) * pull[None, :], 1)
    tl.store(PART + ((lead * splits + split) * parts + part) * rows + row, total, mask=here)


@dataclass(frozen=True)
class Pull:
    """Gradients of the parts' means and log-weights with what the slope adds, and what its kernels read."""

    out: Tensor  # (b*h p c e)
    mean_key: Tensor
    lse: Tensor
    asked: bool
    amount: Tensor  # (b*h p c): pi a
    per_key: Tensor  # (b*h m)
    extra: Tensor  # (b*h p c): amount times the mean of per_key
    slope: Tensor  # (b*h d e)


def no_pull(given: Given) -> Pull:
    out, mean_key, lse = (x.contiguous() for x in (given.out, given.mean_key, given.lse))
    return Pull(out, mean_key, lse, False, lse, lse, lse, lse)


def pull_of(given: Given, c: Tensor, keys: Arranged, pi: Tensor, found: Far, reach: Reach) -> Pull:
    """c in the keys' dtype."""
    assert given.slope is not None
    k, v, parts, slope = keys.k, keys.v, reach.parts, given.slope.float().contiguous()
    (b, h, clusters, d), (hk, m, e) = c.shape, v.shape[1:]
    lead, tile = b * h, tiles_for(k, v, clusters)
    per_key = torch.empty(lead, m, dtype=torch.float32, device=k.device)
    rows = 64 if k.element_size() == 2 else 16  # products of fp32 are written out by the compiler: small ones
    launch(
        pull_kernel, (cdiv(m, rows), lead), (k, v, slope, per_key),
        (m, d, e, h, h // hk, *k.stride()[:3], *v.stride()[:3]),
        BM=rows, BD=tile["BD"], BE=tile["BE"], PRECISION=precision(k), num_warps=4,
    )  # fmt: skip
    row_tiles = -(-clusters // tile["BC"])
    splits, stretch = cuts(m, lead * row_tiles, tile["BM"], parts)
    part = torch.empty(lead, splits, parts, clusters, dtype=torch.float32, device=k.device)
    launch(
        mean_pull_kernel, (splits * parts, row_tiles, lead),
        (c, k, keys.keep_or(c), found.bits, keys.first_or(c), found.lse, per_key, part),
        (clusters, m, d, h, h // hk, reach.scale * LOG2E, (m + 31) // 32, parts, splits, stretch,
        *k.stride()[:3], *keys.keep_strides),
        HAS_KEEP=keys.keep is not None, HAS_NEAR=found.near_at.shape[-1] > 0, HAS_PARTS=keys.first is not None,
        BC=tile["BC"], BM=tile["BM"], BD=power(d), PRECISION=precision(k), num_warps=4,
    )  # fmt: skip
    mean = part.sum(1)  # (lead p c)
    share = torch.exp(found.lse - _finite(found.lse.logsumexp(1, keepdim=True)))
    pi = pi.reshape(lead, 1, clusters)
    amount = pi * share
    kappa, nu = (x[:, :, :1].repeat_interleave(h // hk, 1).reshape(lead, 1, 1, -1).float() for x in (k, v))
    x, y = found.mean_key - kappa, found.out - nu
    turned = (y.flatten(1, 2) @ slope.mT).view_as(x)  # D ybar
    d_share = pi * (mean - (x * turned).sum(-1))
    lse = given.lse + share * (d_share - (share * d_share).sum(1, keepdim=True))
    out = given.out - amount.unsqueeze(-1) * (x.flatten(1, 2) @ slope).view_as(y)
    mean_key = given.mean_key - amount.unsqueeze(-1) * turned
    return Pull(out, mean_key, lse, True, amount, per_key, amount * mean, slope)


def _finite(lse: Tensor) -> Tensor:
    return torch.where(lse == float("-inf"), 0.0, lse)
