"""k-means: the assignment is a product on tensor cores, the update a sum over members (see members/kernels.py).

Sums are split over programs and added up in a fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import jit, power, precision, rows, tl, why_no_kernels
from .._jit import triton as _triton
from ..members import kernels as member_kernels
from .reference import rows_at


@jit
def codes_kernel(
    X, PLANES, THRESHOLDS, OUT, n, d, w, width, heads, sxb, sxh, sxn,
    HAS_THRESHOLDS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Signs of the products with the planes (d w); zeros from w to width."""
    lead, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN)
    dims, bit = tl.arange(0, BD), tl.arange(0, BW)
    x = tl.load(
        X + (lead // heads) * sxb + (lead % heads) * sxh + at.to(tl.int64)[:, None] * sxn + dims[None, :],
        mask=(at < n)[:, None] & (dims < d)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    planes = tl.load(
        PLANES + dims[:, None] * w + bit[None, :], mask=(dims < d)[:, None] & (bit < w)[None, :], other=0.0
    )
    side = tl.dot(x, planes, input_precision=PRECISION)
    if HAS_THRESHOLDS:
        side -= tl.load(THRESHOLDS + bit, mask=bit < w, other=0.0)[None, :]
    sign = tl.where((bit < w)[None, :], tl.where(side > 0, 1.0, -1.0), 0.0)
    tl.store(
        OUT + (lead * n + at)[:, None] * width + bit[None, :], sign.to(OUT.dtype.element_ty),
        mask=(at < n)[:, None] & (bit < width)[None, :],
    )  # fmt: skip


def padded(bits: int) -> int:
    return (bits + 15) // 16 * 16


def dtype_of_codes(x: Tensor) -> torch.dtype:
    """Signs are exact in half precision, whose products run on tensor cores."""
    return torch.float16 if x.dtype == torch.float32 else x.dtype


def codes(x: Tensor, planes: Tensor, thresholds: Tensor | None) -> Tensor:
    x, planes = rows(x), planes.float().contiguous()
    (b, h, n, d), w = x.shape, planes.shape[1]
    out = torch.empty(b, h, n, padded(w), dtype=dtype_of_codes(x), device=x.device)
    if out.numel():
        codes_kernel[(_triton.cdiv(n, 64), b * h)](
            x, planes, thresholds.float().contiguous() if thresholds is not None else planes, out,
            n, d, w, padded(w), h, *x.stride()[:3],
            HAS_THRESHOLDS=thresholds is not None, BN=64, BD=power(d), BW=power(w),
            PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32", num_warps=4,
        )  # fmt: skip
    return out


@jit
def nearest_kernel(
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
def _added(SUMS, COUNTS, lead, which, dims, c, d, splits, BC: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):
    """The parts of each cluster's sum and of its number of members, added up in their order."""
    total, count = tl.zeros((BC, BD), tl.float32), tl.zeros((BC,), tl.float32)
    for first in range(0, splits, BS):
        split = first + tl.arange(0, BS)
        row = (lead * splits + split[None, :]) * c + which[:, None]
        mine = (split < splits)[None, :] & (which < c)[:, None]
        mask = mine[:, :, None] & (dims < d)[None, None, :]
        total += tl.sum(tl.load(SUMS + row[:, :, None] * d + dims[None, None, :], mask=mask, other=0.0), 1)
        count += tl.sum(tl.load(COUNTS + row, mask=mine, other=0.0), 1)
    return total, count


@jit
def add_up_kernel(
    SUMS, COUNTS, OUT, TOTAL, c, d, splits, MEAN: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr
):
    """Sums of the members, or their means, and how many they are."""
    lead = tl.program_id(1).to(tl.int64)
    which, dims = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BD)
    total, count = _added(SUMS, COUNTS, lead, which, dims, c, d, splits, BC, BS, BD)
    if MEAN:
        total = total / tl.maximum(count, 1.0)[:, None]
    place = lead * c + which
    tl.store(
        OUT + place[:, None] * d + dims[None, :], total.to(OUT.dtype.element_ty),
        mask=(which < c)[:, None] & (dims < d)[None, :],
    )  # fmt: skip
    tl.store(TOTAL + place, count.to(tl.int64), mask=which < c)


@jit
def _seen(centroid, FORM, lead, d, dims, HAS_FORM: tl.constexpr):
    """The centroids as the metric sees them: S c."""
    seen = centroid
    if HAS_FORM:
        wide = dims < d
        form = tl.load(
            FORM + lead * d * d + dims[:, None] * d + dims[None, :], mask=wide[:, None] & wide[None, :], other=0.0
        )
        seen = tl.dot(centroid, form, input_precision="tf32x3")  # as good as fp32, on tensor cores
    return seen


@jit
def start_kernel(
    X, AT, FORM, CENTROIDS, ORIGIN, ALIVE, W, OFFSET, d, c, heads, sxb, sxh, sxn, sab, sah,
    HAS_FORM: tl.constexpr, SIGNS: tl.constexpr, BC: tl.constexpr, BA: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The points at AT become the centroids, relative to their mean, with their side of the product."""
    lead = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BD)
    wide = dims < d
    base, at_base = X + (lead // heads) * sxb + (lead % heads) * sxh, AT + (lead // heads) * sab + (lead % heads) * sah
    origin, living = tl.zeros((BD,), tl.float32), 0.0
    if not SIGNS:  # every program finds the same mean: reading all starts again is cheaper than another launch
        for first in range(0, c, BA):
            which = first + tl.arange(0, BA)
            at = tl.load(at_base + which, mask=which < c, other=-1)
            x = tl.load(base + at[:, None] * sxn + dims[None, :], mask=(at >= 0)[:, None] & wide[None, :], other=0.0)
            origin += tl.sum(x.to(tl.float32), 0)
            living += tl.sum((at >= 0).to(tl.float32), 0)
        origin = origin / tl.maximum(living, 1.0)
    which = tl.program_id(0) * BC + tl.arange(0, BC)
    here = which < c
    at = tl.load(at_base + which, mask=here, other=-1)
    alive = at >= 0
    x = tl.load(base + at[:, None] * sxn + dims[None, :], mask=alive[:, None] & wide[None, :], other=0.0)
    centroid = tl.where(alive[:, None], x.to(tl.float32) - origin[None, :], 0.0)
    seen = _seen(centroid, FORM, lead, d, dims, HAS_FORM)
    offset = tl.zeros((BC,), tl.float32)
    if not SIGNS:
        offset = -0.5 * tl.sum(centroid * seen, axis=1)
    place = (lead * c + which[:, None]) * d + dims[None, :]
    mask = here[:, None] & wide[None, :]
    tl.store(CENTROIDS + place, centroid, mask=mask)
    tl.store(W + place, seen.to(W.dtype.element_ty), mask=mask)
    tl.store(OFFSET + lead * c + which, tl.where(alive, offset, float("-inf")), mask=here)
    tl.store(ALIVE + lead * c + which, alive.to(tl.int8), mask=here)
    if tl.program_id(0) == 0:
        tl.store(ORIGIN + lead * d + dims, origin, mask=wide)


@jit
def update_kernel(
    SUMS, COUNTS, CENTROIDS, ORIGIN, FORM, ALIVE, W, OFFSET, c, d, splits,
    MOVE: tl.constexpr, HAS_ORIGIN: tl.constexpr, HAS_FORM: tl.constexpr, SIGNS: tl.constexpr,
    BC: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Means of the sums become the centroids (an empty cluster keeps its own), with their side of the next product."""
    lead = tl.program_id(1).to(tl.int64)
    which, dims = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BD)
    here, wide = which < c, dims < d
    place = (lead * c + which[:, None]) * d + dims[None, :]
    mask = here[:, None] & wide[None, :]
    centroid = tl.load(CENTROIDS + place, mask=mask, other=0.0)
    if MOVE:
        total, count = _added(SUMS, COUNTS, lead, which, dims, c, d, splits, BC, BS, BD)
        if SIGNS:
            mean = tl.where(total > 0, 1.0, -1.0)
        else:
            mean = total / tl.maximum(count, 1.0)[:, None]
            if HAS_ORIGIN:
                mean -= tl.load(ORIGIN + lead * d + dims, mask=wide, other=0.0)[None, :]
        centroid = tl.where((count[:, None] > 0) & mask, mean, centroid)
        tl.store(CENTROIDS + place, centroid, mask=mask)
    seen = _seen(centroid, FORM, lead, d, dims, HAS_FORM)
    offset = tl.zeros((BC,), tl.float32)
    if not SIGNS:
        offset = -0.5 * tl.sum(centroid * seen, axis=1)
    alive = tl.load(ALIVE + lead * c + which, mask=here, other=0)
    tl.store(W + place, seen.to(W.dtype.element_ty), mask=mask)
    tl.store(OFFSET + lead * c + which, tl.where(alive != 0, offset, float("-inf")), mask=here)


@jit
def farthest_kernel(CENTROIDS, W, OFFSET, GAP, CHOSEN, p, c, d, BP: tl.constexpr, BD: tl.constexpr):
    """One head: first the point farthest from the mean, then always the one farthest from all chosen ones.

    The squared distance of i and j is norm(i) + norm(j) - 2 w(i) . x(j); what start_kernel left holds all three.
    """
    lead, at, dims = tl.program_id(0).to(tl.int64), tl.arange(0, BP), tl.arange(0, BD)
    best, where = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    for first in range(0, p, BP):
        point = first + at
        gap = tl.load(OFFSET + lead * p + point, mask=point < p, other=float("-inf"))
        gap = tl.where(gap == float("-inf"), gap, -2 * gap)  # its distance from the mean
        highest, index = tl.max(gap, 0, return_indices=True)
        where = tl.where(highest > best, first + index, where)
        best = tl.maximum(best, highest)
    for pick in range(c):
        tl.store(CHOSEN + lead * c + pick, tl.where(best == float("-inf"), -1, where).to(tl.int64))
        chosen = tl.load(CENTROIDS + (lead * p + where) * d + dims, mask=dims < d, other=0.0)
        norm, last = -2 * tl.load(OFFSET + lead * p + where), where
        best, where = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
        for first in range(0, p, BP):
            point = first + at
            w = tl.load(
                W + (lead * p + point)[:, None] * d + dims[None, :],
                mask=(point < p)[:, None] & (dims < d)[None, :], other=0.0,
            )  # fmt: skip
            own = tl.load(OFFSET + lead * p + point, mask=point < p, other=float("-inf"))
            apart = norm - 2 * own - 2 * tl.sum(w.to(tl.float32) * chosen[None, :], 1)
            if pick > 0:
                apart = tl.minimum(apart, tl.load(GAP + lead * p + point, mask=point < p, other=float("-inf")))
            apart = tl.where((own == float("-inf")) | (point == last), float("-inf"), apart)
            tl.store(GAP + lead * p + point, apart, mask=point < p)
            highest, index = tl.max(apart, 0, return_indices=True)
            where = tl.where(highest > best, first + index, where)
            best = tl.maximum(best, highest)


def why_not(points: Tensor) -> str | None:
    return why_no_kernels(points)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _tile(points: Tensor) -> tuple[int, int]:
    """Rows per tile and warps, by the width of a row."""
    wide = power(points.shape[-1])
    return (256 if points.element_size() == 2 else 128, 4) if wide <= 64 else (64, 4)


def _prepare(
    points: Tensor, centroids: Tensor, alive: Tensor, origin: Tensor | None, form: Tensor | None, signs: bool,
    sums: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The product's right side (lead c w) in the points' dtype and its offset; with sums, the centroids move first."""
    lead, c, d = centroids.shape
    w = torch.empty(lead, c, d, dtype=points.dtype, device=points.device)
    offset = torch.empty(lead, c, dtype=torch.float32, device=points.device)
    totals, counts = sums if sums is not None else (centroids, offset)
    splits = totals.shape[1] if sums is not None else 0
    tile = 16
    update_kernel[(_triton.cdiv(c, tile), lead)](
        totals, counts, centroids, origin if origin is not None else centroids, form if form is not None else centroids,
        alive, w, offset, c, d, splits,
        MOVE=sums is not None, HAS_ORIGIN=origin is not None, HAS_FORM=form is not None, SIGNS=signs,
        BC=tile, BS=min(4, power(splits, least=1)), BD=power(d), num_warps=4,
    )  # fmt: skip
    return w, offset


def nearest(points: Tensor, right: Tensor, offset: Tensor, origin: Tensor | None) -> Tensor:
    """points (b h n d), right (lead c d), offset (lead c), origin (lead 1 d) -> labels (lead n)."""
    points, right, origin = rows(points), right.to(points.dtype).contiguous(), _dense(origin)
    (b, h, n, d), c = points.shape, right.shape[1]
    labels = torch.zeros if 0 in (points.numel(), c) else torch.empty
    found = labels(b * h, n, dtype=torch.int64, device=points.device)
    if found.numel() == 0 or c == 0:
        return found
    tile, warps = _tile(points)
    nearest_kernel[(_triton.cdiv(n, tile), b * h)](
        points, origin if origin is not None else right, right, offset.float().contiguous(), found,
        n, d, c, h, *points.stride()[:3],
        HAS_ORIGIN=origin is not None, BN=tile, BD=power(d), BC=min(128, power(c)),
        PRECISION=precision(points), num_warps=warps,
    )  # fmt: skip
    return found


def _add_up(parts: Tensor, counts: Tensor, dtype: torch.dtype, mean: bool) -> tuple[Tensor, Tensor]:
    """(lead splits c d), (lead splits c) -> sums or means (lead c d) and the number of members (lead c)."""
    lead, splits, c, d = parts.shape
    out = torch.empty(lead, c, d, dtype=dtype, device=parts.device)
    total = torch.empty(lead, c, dtype=torch.int64, device=parts.device)
    few = min(32, power(splits, least=1))
    each = max(1, 64 // few)
    add_up_kernel[(_triton.cdiv(c, each), lead)](
        parts, counts, out, total, c, d, splits, MEAN=mean, BC=each, BS=few, BD=power(d), num_warps=4
    )
    return out, total


def member_sums(x: Tensor, order: Tensor, first: Tensor, dtype: torch.dtype, mean: bool) -> tuple[Tensor, Tensor]:
    """Sums or means (b h c d) of the members of each cluster, and their number (b h c)."""
    (b, h, _, d), c = x.shape, first.shape[1] - 2
    out, total = _add_up(*member_kernels.sums(x, order, first), dtype, mean)
    return out.view(b, h, c, d), total.view(b, h, c)


def why_not_means(x: Tensor, members: object) -> str | None:
    return why_not(x) if members is not None else "the members are not sorted"


def means(x: Tensor, member_of: Tensor, order: Tensor, first: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    return member_sums(x, order, first, x.dtype, mean=True)


def _start(
    points: Tensor, at: Tensor, form: Tensor | None, signs: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Centroids, alive, origin, right side and offset of the points (b h n d) at positions (b h c)."""
    (b, h, _, d), c = points.shape, at.shape[2]

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(b * h, *shape, dtype=dtype, device=points.device)

    centroids, alive, origin = new(c, d), new(c, dtype=torch.int8), new(1, d)
    w, offset = new(c, d, dtype=points.dtype), new(c)
    at = at if at.stride(-1) == 1 else at.contiguous()
    tile = 32
    start_kernel[(_triton.cdiv(c, tile), b * h)](
        points, at, form if form is not None else points, centroids, origin, alive, w, offset,
        d, c, h, *points.stride()[:3], *at.stride()[:2],
        HAS_FORM=form is not None, SIGNS=signs, BC=tile, BA=min(128, power(c)), BD=power(d), num_warps=4,
    )  # fmt: skip
    return centroids, alive, origin, w, offset


def farthest(points: Tensor, pool_at: Tensor, clusters: int, form: Tensor | None, signs: bool) -> Tensor:
    """Of the points (b h n d) at pool_at (b h p), the places in the pool (lead c) of those that lie far apart."""
    points, (b, h, p), d = rows(points), pool_at.shape, points.shape[3]
    centroids, _, _, w, offset = _start(points, pool_at, _dense(form), False)
    chosen = torch.empty(b * h, clusters, dtype=torch.int64, device=points.device)
    farthest_kernel[(b * h,)](
        centroids, w, offset, torch.empty_like(offset), chosen, p, clusters, d,
        BP=min(32768 // power(d), power(p)), BD=power(d), num_warps=16,
    )  # fmt: skip
    return chosen


def kmeans(
    points: Tensor,
    valid: Tensor | None,
    start_at: Tensor,
    train_at: Tensor | None,
    form: Tensor | None,
    updates: int,
    signs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    points, form = rows(points), _dense(form)
    centroids, alive, origin, w, offset = _start(points, start_at, form, signs)
    if updates:
        if train_at is not None:
            points, valid = rows_at(points, train_at), (train_at >= 0).flatten(0, 1)
        w, offset = _train(points, valid, None if signs else origin, centroids, alive, form, updates, signs, w, offset)
    return w, offset, origin


def _train(
    points: Tensor, valid: Tensor | None, origin: Tensor | None, centroids: Tensor, alive: Tensor, form: Tensor | None,
    updates: int, signs: bool, w: Tensor, offset: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rounds of assignment and update; the centroids move in place."""
    for _ in range(updates):
        labels = nearest(points, w, offset, origin)
        if valid is not None:
            labels = torch.where(valid, labels, -1)
        members = member_kernels.by_label(labels, centroids.shape[1])
        w, offset = _prepare(points, centroids, alive, origin, form, signs, member_kernels.sums(points, *members))
    return w, offset


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
    if points.numel() and centroids.numel():
        first = _prepare(points, centroids, alive, origin, form, signs, None)
        _train(points, valid, origin, centroids, alive, form, updates, signs, *first)
    return centroids
