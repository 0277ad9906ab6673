"""k-means on tensor cores: assignment and update are two products (points x centroids, one-hot x points).

Sums are split over programs and added up in a fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import jit, power, precision, rows, tl, why_no_kernels
from .._jit import triton as _triton


@jit
def assign_fwd_kernel(
    X, ORIGIN, W, OFFSET, LABELS, n, d, c, heads, sxb, sxh, sxn,
    HAS_ORIGIN: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lead = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    dims = tl.arange(0, BD)
    real, wide = at < n, dims < d
    x = tl.load(
        X + (lead // heads) * sxb + (lead % heads) * sxh + at.to(tl.int64)[:, None] * sxn + dims[None, :],
        mask=real[:, None] & wide[None, :], other=0.0,
    )  # fmt: skip
    if HAS_ORIGIN:
        origin = tl.load(ORIGIN + lead * d + dims, mask=wide, other=0.0)
        x = (x.to(tl.float32) - origin[None, :]).to(x.dtype)
    best = tl.full((BN,), float("-inf"), tl.float32)
    label = tl.zeros((BN,), tl.int32)
    for first in range(0, c, BC):
        which = first + tl.arange(0, BC)
        w = tl.load(
            W + (lead * c + which[:, None]) * d + dims[None, :], mask=(which[:, None] < c) & wide[None, :], other=0.0
        )
        offset = tl.load(OFFSET + lead * c + which, mask=which < c, other=float("-inf"))
        scores = tl.dot(x, tl.trans(w), input_precision=PRECISION) + offset[None, :]
        highest, index = tl.max(scores, axis=1, return_indices=True)
        label = tl.where(highest > best, index + first, label)
        best = tl.maximum(best, highest)
    tl.store(LABELS + lead * n + at, label.to(tl.int64), mask=real)


@jit
def sums_fwd_kernel(
    X, ORIGIN, LABELS, SUMS, COUNTS, n, d, c, heads, splits, per, sxb, sxh, sxn,
    HAS_ORIGIN: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums (lead splits c d) and counts (lead splits c) of the rows of each label; labels < 0 belong to nobody."""
    split, which = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    lead = tl.program_id(2).to(tl.int64)
    dims = tl.arange(0, BD)
    wide = dims < d
    base = X + (lead // heads) * sxb + (lead % heads) * sxh
    origin = tl.zeros((BD,), tl.float32)
    if HAS_ORIGIN:
        origin = tl.load(ORIGIN + lead * d + dims, mask=wide, other=0.0)
    total = tl.zeros((BC, BD), tl.float32)
    count = tl.zeros((BC,), tl.float32)
    for first in range(split * per, min(n, (split + 1) * per), BN):
        at = first + tl.arange(0, BN)
        real = at < min(n, (split + 1) * per)
        label = tl.load(LABELS + lead * n + at, mask=real, other=-1).to(tl.int32)
        x = tl.load(
            base + at.to(tl.int64)[:, None] * sxn + dims[None, :], mask=real[:, None] & wide[None, :], other=0.0
        )
        if HAS_ORIGIN:
            x = (x.to(tl.float32) - origin[None, :]).to(x.dtype)
        mine = which[:, None] == label[None, :]
        total += tl.dot(mine.to(x.dtype), x, input_precision=PRECISION)
        count += tl.sum(mine.to(tl.float32), axis=1)
    out = (lead * splits + split) * c + which
    tl.store(SUMS + out[:, None] * d + dims[None, :], total, mask=(which[:, None] < c) & wide[None, :])
    tl.store(COUNTS + out, count, mask=which < c)


@jit
def update_kernel(
    SUMS, COUNTS, CENTROIDS, FORM, ALIVE, W, OFFSET, c, d, splits, updates,
    HAS_FORM: tl.constexpr, SIGNS: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Means of the sums become the centroids (an empty cluster keeps its own), with their side of the next product."""
    lead = tl.program_id(1).to(tl.int64)
    which, dims = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BD)
    here, wide = which < c, dims < d
    place = (lead * c + which[:, None]) * d + dims[None, :]
    mask = here[:, None] & wide[None, :]
    centroid = tl.load(CENTROIDS + place, mask=mask, other=0.0)
    if updates > 0:
        total, count = tl.zeros((BC, BD), tl.float32), tl.zeros((BC,), tl.float32)
        for split in range(splits):
            row = (lead * splits + split) * c + which
            total += tl.load(SUMS + row[:, None] * d + dims[None, :], mask=mask, other=0.0)
            count += tl.load(COUNTS + row, mask=here, other=0.0)
        if SIGNS:
            mean = tl.where(total > 0, 1.0, -1.0)
        else:
            mean = total / tl.maximum(count, 1.0)[:, None]
        centroid = tl.where(count[:, None] > 0, mean, centroid)
        tl.store(CENTROIDS + place, centroid, mask=mask)
    seen = centroid
    if HAS_FORM:
        form = tl.load(
            FORM + lead * d * d + dims[:, None] * d + dims[None, :], mask=wide[:, None] & wide[None, :], other=0.0
        )
        seen = tl.dot(centroid, form, input_precision="ieee")
    offset = tl.zeros((BC,), tl.float32)
    if not SIGNS:
        offset = -0.5 * tl.sum(tl.where(wide[None, :], centroid * seen, 0.0), axis=1)
    alive = tl.load(ALIVE + lead * c + which, mask=here, other=0)
    tl.store(W + place, seen.to(W.dtype.element_ty), mask=mask)
    tl.store(OFFSET + lead * c + which, tl.where(alive != 0, offset, float("-inf")), mask=here)


def why_not(points: Tensor) -> str | None:
    return why_no_kernels(points)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _tile(points: Tensor) -> tuple[int, int]:
    """Rows per tile and warps, by the width of a row."""
    wide = power(points.shape[-1])
    return (128, 4) if wide <= 64 else (64, 4)


def _prepare(
    points: Tensor,
    centroids: Tensor,
    alive: Tensor,
    form: Tensor | None,
    signs: bool,
    sums: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """The product's right side (lead c w) in the points' dtype and its offset; with sums, the centroids move first."""
    lead, c, d = centroids.shape
    w = torch.empty(lead, c, d, dtype=points.dtype, device=points.device)
    offset = torch.empty(lead, c, dtype=torch.float32, device=points.device)
    totals, counts = sums if sums is not None else (centroids, offset)
    splits = totals.shape[1] if sums is not None else 0
    tile = 32
    update_kernel[(_triton.cdiv(c, tile), lead)](
        totals, counts, centroids, form if form is not None else centroids, alive, w, offset,
        c, d, splits, int(sums is not None),
        HAS_FORM=form is not None, SIGNS=signs, BC=tile, BD=power(d), num_warps=4,
    )  # fmt: skip
    return w, offset


def _assign(points: Tensor, origin: Tensor | None, w: Tensor, offset: Tensor) -> Tensor:
    (b, h, n, d), c = points.shape, w.shape[1]
    labels = torch.empty(b * h, n, dtype=torch.int64, device=points.device)
    tile, warps = _tile(points)
    assign_fwd_kernel[(_triton.cdiv(n, tile), b * h)](
        points, origin if origin is not None else w, w, offset, labels, n, d, c, h, *points.stride()[:3],
        HAS_ORIGIN=origin is not None, BN=tile, BD=power(d), BC=min(128, power(c)),
        PRECISION=precision(points), num_warps=warps,
    )  # fmt: skip
    return labels


def sums(points: Tensor, origin: Tensor | None, labels: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Partial sums (lead splits c d) and counts (lead splits c): points (b h n d), labels (lead n)."""
    points, labels = rows(points), labels.contiguous()
    b, h, n, d = points.shape
    tile = 32  # measured on an H200: short tiles, so that loads and products overlap
    columns = min(128, power(clusters))
    # enough programs for a large chip, none with less than a few tiles of rows
    splits = max(1, min(_triton.cdiv(n, 8 * tile), _triton.cdiv(264, b * h * _triton.cdiv(clusters, columns))))
    per = _triton.cdiv(_triton.cdiv(n, splits), tile) * tile
    totals = torch.empty(b * h, splits, clusters, d, dtype=torch.float32, device=points.device)
    counts = torch.empty(b * h, splits, clusters, dtype=torch.float32, device=points.device)
    sums_fwd_kernel[(splits, _triton.cdiv(clusters, columns), b * h)](
        points, origin if origin is not None else totals, labels, totals, counts,
        n, d, clusters, h, splits, per, *points.stride()[:3],
        HAS_ORIGIN=origin is not None, BN=tile, BD=power(d), BC=columns,
        PRECISION=precision(points), num_warps=4,
    )  # fmt: skip
    return totals, counts


def assign(
    points: Tensor, origin: Tensor | None, centroids: Tensor, alive: Tensor, form: Tensor | None, signs: bool
) -> Tensor:
    points, origin, form = rows(points), _dense(origin), _dense(form)
    if points.numel() == 0 or centroids.numel() == 0:
        return torch.zeros(centroids.shape[0], points.shape[2], dtype=torch.int64, device=points.device)
    w, offset = _prepare(points, centroids.float().contiguous(), alive.contiguous(), form, signs, None)
    return _assign(points, origin, w, offset)


def lloyd(
    points: Tensor,
    valid: Tensor,
    origin: Tensor | None,
    centroids: Tensor,
    alive: Tensor,
    form: Tensor | None,
    updates: int,
    signs: bool,
) -> Tensor:
    points, origin, form = rows(points), _dense(origin), _dense(form)
    centroids, alive = centroids.float().clone(memory_format=torch.contiguous_format), alive.contiguous()
    if points.numel() == 0 or centroids.numel() == 0:
        return centroids
    w, offset = _prepare(points, centroids, alive, form, signs, None)
    for _ in range(updates):
        labels = torch.where(valid, _assign(points, origin, w, offset), -1)
        w, offset = _prepare(points, centroids, alive, form, signs, sums(points, origin, labels, centroids.shape[1]))
    return centroids
