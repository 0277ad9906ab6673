"""Cov(K) on tensor cores: how the keys see the distance between two queries. Split over the keys, added in order."""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import jit, power, precision, rows, tl
from .._jit import triton as _triton


@jit
def moments_kernel(
    K, KEEP, SECOND, FIRST, m, d, heads, splits, stretch, skb, skh, skm,
    HAS_KEEP: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of k kT and of (k, 1) over a stretch of keys, relative to the first key: a shared offset costs no digits."""
    split, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BD)
    base = K + (lead // heads) * skb + (lead % heads) * skh
    shift = tl.load(base + dims, mask=dims < d, other=0.0).to(tl.float32)
    second, first, count = tl.zeros((BD, BD), tl.float32), tl.zeros((BD,), tl.float32), 0.0
    for start in range(split * stretch, min(m, (split + 1) * stretch), BM):
        key = start + tl.arange(0, BM)
        real = key < min(m, (split + 1) * stretch)
        if HAS_KEEP:
            real = real & (tl.load(KEEP + (lead // heads) * m + key, mask=real, other=0) != 0)
        k = tl.load(
            base + key.to(tl.int64)[:, None] * skm + dims[None, :], mask=real[:, None] & (dims < d)[None, :], other=0.0
        )
        moved = tl.where(real[:, None], k.to(tl.float32) - shift[None, :], 0.0)
        second += tl.dot(tl.trans(moved.to(k.dtype)), moved.to(k.dtype), input_precision=PRECISION)
        first += tl.sum(moved, 0)
        count += tl.sum(real.to(tl.float32))
    out = lead * splits + split
    tl.store(
        SECOND + out * d * d + dims[:, None] * d + dims[None, :], second, mask=(dims < d)[:, None] & (dims < d)[None, :]
    )
    tl.store(FIRST + out * (d + 1) + dims, first, mask=dims < d)
    tl.store(FIRST + out * (d + 1) + d, count)


def covariance(k: Tensor, keep: Tensor | None) -> Tensor:
    """k (b hk m d), keep (b m) -> (b hk d d) in fp32."""
    k = rows(k)
    b, hk, m, d = k.shape
    tile = 64 if power(d) > 64 else 128
    splits = max(1, min(_triton.cdiv(m, 2 * tile), _triton.cdiv(264, b * hk)))
    stretch = _triton.cdiv(_triton.cdiv(m, splits), tile) * tile
    second = torch.empty(b, hk, splits, d, d, dtype=torch.float32, device=k.device)
    first = torch.empty(b, hk, splits, d + 1, dtype=torch.float32, device=k.device)
    moments_kernel[(splits, b * hk)](
        k, keep.contiguous() if keep is not None else k, second, first, m, d, hk, splits, stretch, *k.stride()[:3],
        HAS_KEEP=keep is not None, BM=tile, BD=power(d), PRECISION=precision(k), num_warps=4,
    )  # fmt: skip
    total = first.sum(2)
    count = total[..., d:].clamp(min=1)
    mean = total[..., :d] / count
    return second.sum(2) / count.unsqueeze(-1) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
