"""Cov(K) on tensor cores: how the keys see the distance between two queries. Split over the keys, added in order."""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import in_turn, jit, power, precision, rows, tl
from .._launch import cdiv, launch, workspace


@jit
def moments_kernel(
    K, KEEP, AT, SECOND, FIRST, m, d, heads, splits, stretch, skb, skh, skm, sab, sah,
    HAS_KEEP: tl.constexpr, HAS_AT: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of k kT, BC of its columns, and of (k, 1) over a stretch of keys, relative to the first key: a shared offset
    costs no digits.

    HAS_AT: over the keys at positions AT (lead m), -1 being none."""
    in_turn()
    split, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dims, columns = tl.arange(0, BD), tl.program_id(2) * BC + tl.arange(0, BC)
    base = K + (lead // heads) * skb + (lead % heads) * skh
    shift = tl.load(base + dims, mask=dims < d, other=0.0).to(tl.float32)
    second, first, count = tl.zeros((BD, BC), tl.float32), tl.zeros((BD,), tl.float32), 0.0
    for start in range(split * stretch, min(m, (split + 1) * stretch), BM):
        key = start + tl.arange(0, BM)
        real = key < min(m, (split + 1) * stretch)
        if HAS_AT:
            key = tl.load(AT + (lead // heads) * sab + (lead % heads) * sah + key, mask=real, other=-1)
            real = key >= 0
        if HAS_KEEP:
            real = real & (tl.load(KEEP + (lead // heads) * m + key, mask=real, other=0) != 0)
        k = tl.load(
            base + key.to(tl.int64)[:, None] * skm + dims[None, :], mask=real[:, None] & (dims < d)[None, :], other=0.0
        )
        moved = tl.where(real[:, None], k.to(tl.float32) - shift[None, :], 0.0)
        right = moved.to(k.dtype)
        if BC < BD:
            right = tl.load(
                base + key.to(tl.int64)[:, None] * skm + columns[None, :],
                mask=real[:, None] & (columns < d)[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            offset = tl.load(base + columns, mask=columns < d, other=0.0).to(tl.float32)
            right = tl.where(real[:, None], right - offset[None, :], 0.0).to(k.dtype)
        second += tl.dot(tl.trans(moved.to(k.dtype)), right, input_precision=PRECISION)
        first += tl.sum(moved, 0)
        count += tl.sum(real.to(tl.float32))
    out = lead * splits + split
    tl.store(
        SECOND + out * d * d + dims[:, None] * d + columns[None, :],
        second,
        mask=(dims < d)[:, None] & (columns < d)[None, :],
    )
    if tl.program_id(2) == 0:
        tl.store(FIRST + out * (d + 1) + dims, first, mask=dims < d)
        tl.store(FIRST + out * (d + 1) + d, count)


@jit
def covariance_kernel(SECOND, FIRST, OUT, d, splits, BR: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):
    """E[k kT] - E[k] E[k]T from the splits' sums, a few rows of the matrix at a time."""
    in_turn()
    lead, part, dims = tl.program_id(1).to(tl.int64), tl.arange(0, BS), tl.arange(0, BD)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = (row < d)[:, None] & (dims < d)[None, :]
    second, mean_row = tl.zeros((BR, BD), tl.float32), tl.zeros((BR,), tl.float32)
    mean, count = tl.zeros((BD,), tl.float32), 0.0
    for first in range(0, splits, BS):
        split = first + part
        there, place = split < splits, lead * splits + split
        second += tl.sum(
            tl.load(
                SECOND + place[:, None, None] * d * d + row[None, :, None] * d + dims[None, None, :],
                mask=there[:, None, None] & inside[None, :, :], other=0.0,
            ), 0,
        )  # fmt: skip
        sums = FIRST + place[:, None] * (d + 1)
        mean_row += tl.sum(tl.load(sums + row[None, :], mask=there[:, None] & (row < d)[None, :], other=0.0), 0)
        mean += tl.sum(tl.load(sums + dims[None, :], mask=there[:, None] & (dims < d)[None, :], other=0.0), 0)
        count += tl.sum(tl.load(FIRST + place * (d + 1) + d, mask=there, other=0.0), 0)
    count = tl.maximum(count, 1.0)
    cov = second / count - (mean_row / count)[:, None] * (mean / count)[None, :]
    tl.store(OUT + lead * d * d + row[:, None] * d + dims[None, :], cov, mask=inside)


def covariance(k: Tensor, keep: Tensor | None, at: Tensor | None) -> Tensor:
    """k (b hk m d), keep (b m) or at (b hk s) -> (b hk d d) in fp32."""
    k = rows(k)
    b, hk, m, d = k.shape
    if at is not None:
        m, keep, at = at.shape[2], None, at if at.stride(-1) == 1 else at.contiguous()
    tile = 32 if power(d) * k.element_size() > 512 else 64 if power(d) > 64 else 128
    splits = max(1, min(cdiv(m, 2 * tile), cdiv(264, b * hk)))
    stretch = cdiv(cdiv(m, splits), tile) * tile
    second, first = workspace(k.device, ((b, hk, splits, d, d), torch.float32), ((b, hk, splits, d + 1), torch.float32))
    columns = min(64, power(d))  # more would not fit registers
    launch(
        moments_kernel, (splits, b * hk, cdiv(d, columns)),
        (k, keep.contiguous() if keep is not None else k, at if at is not None else k, second, first),
        (m, d, hk, splits, stretch, *k.stride()[:3], *(at.stride()[:2] if at is not None else (0, 0))),
        HAS_KEEP=keep is not None, HAS_AT=at is not None, BM=tile, BD=power(d), BC=columns,
        PRECISION=precision(k), num_warps=4 if power(d) <= 64 else 8,
    )  # fmt: skip
    cov = torch.empty(b, hk, d, d, dtype=torch.float32, device=k.device)
    launch(
        covariance_kernel, (cdiv(d, 8), b * hk), (second, first, cov), (d, splits),
        BR=8, BS=min(8, power(splits, least=1)), BD=power(d), num_warps=4,
    )  # fmt: skip
    return cov
