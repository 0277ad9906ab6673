"""k-means: codes, starts, and the members' means.

Training is in train_kernels.py, starts that lie far apart in far_kernels.py, the assignment of everybody in
nearest_kernels.py. Sums are split over programs and added up in a fixed
order: the same inputs give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._jit import in_turn, jit, power, rows, tl
from .._launch import Buffer, cdiv, launch, workspace
from ..members import kernels as member_kernels
from . import dtype_of_codes, padded
from .far_kernels import far
from .nearest_kernels import nearest
from .reference import FEW, rows_at
from .train_kernels import fits, move, seen_by, train, train_apart

TOGETHER = 1 << 16  # rows, over all heads, that are trained on in one launch


@jit
def codes_kernel(
    X, PLANES, THRESHOLDS, OUT, n, d, w, width, heads, sxb, sxh, sxn, spd, spw, st,
    HAS_THRESHOLDS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Signs of the products with the planes (d w); zeros from w to width."""
    in_turn()
    lead, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN)
    dims, bit = tl.arange(0, BD), tl.arange(0, BW)
    x = tl.load(
        X + (lead // heads) * sxb + (lead % heads) * sxh + at.to(tl.int64)[:, None] * sxn + dims[None, :],
        mask=(at < n)[:, None] & (dims < d)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    planes = tl.load(
        PLANES + dims[:, None] * spd + bit[None, :] * spw, mask=(dims < d)[:, None] & (bit < w)[None, :], other=0.0
    )
    side = tl.dot(x, planes, input_precision=PRECISION)
    if HAS_THRESHOLDS:
        side -= tl.load(THRESHOLDS + bit * st, mask=bit < w, other=0.0)[None, :]
    sign = tl.where((bit < w)[None, :], tl.where(side > 0, 1.0, -1.0), 0.0)
    tl.store(
        OUT + (lead * n + at)[:, None] * width + bit[None, :], sign.to(OUT.dtype.element_ty),
        mask=(at < n)[:, None] & (bit < width)[None, :],
    )  # fmt: skip


def codes(x: Tensor, planes: Tensor, thresholds: Tensor | None) -> Tensor:
    x, planes = rows(x), planes.float()
    beyond = planes[0] if thresholds is None else thresholds.float()
    (b, h, n, d), w = x.shape, planes.shape[1]
    out = torch.empty(b, h, n, padded(w), dtype=dtype_of_codes(x), device=x.device)
    if out.numel():
        launch(
            codes_kernel, (cdiv(n, 64), b * h), (x, planes, beyond, out),
            (n, d, w, padded(w), h, *x.stride()[:3], *planes.stride(), *beyond.stride()),
            HAS_THRESHOLDS=thresholds is not None, BN=64, BD=power(d), BW=power(w),
            PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32", num_warps=4,
        )  # fmt: skip
    return out


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
    in_turn()
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
def start_kernel(
    X, AT, FORM, CENTROIDS, ORIGIN, W, OFFSET, BARRIER, BEST, d, c, few, heads, picks, sxb, sxh, sxn, sab, sah,
    HAS_FORM: tl.constexpr, SIGNS: tl.constexpr, FAR: tl.constexpr,
    BC: tl.constexpr, BA: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The points at AT become the centroids, relative to the mean of a few, with their side of the product.

    What training counts with begins at zero: BARRIER (lead), and with FAR what cells offer, BEST (3 lead picks)."""
    in_turn()
    lead = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BD)
    wide = dims < d
    base, at_base = X + (lead // heads) * sxb + (lead % heads) * sxh, AT + (lead // heads) * sab + (lead % heads) * sah
    origin, living = tl.zeros((BD,), tl.float32), 0.0
    if not SIGNS:  # every program finds the same mean: reading all starts again is cheaper than another launch
        for first in range(0, few, BA):
            which = first + tl.arange(0, BA)
            at = tl.load(at_base + which, mask=which < few, other=-1)
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
    place = (lead * c + which[:, None]) * d + dims[None, :]
    mask = here[:, None] & wide[None, :]
    tl.store(CENTROIDS + place, centroid, mask=mask)
    seen, offset = centroid, tl.zeros((BC,), tl.float32)
    if HAS_FORM:
        tl.debug_barrier()
        seen = seen_by(CENTROIDS, FORM, lead, which, dims, c, d, BC, BD, BK)
    if not SIGNS:
        offset = -0.5 * tl.sum(centroid * seen, axis=1)
    tl.store(W + place, seen.to(W.dtype.element_ty), mask=mask)
    tl.store(OFFSET + lead * c + which, tl.where(alive, offset, float("-inf")), mask=here)
    if tl.program_id(0) == 0:
        tl.store(ORIGIN + lead * d + dims, origin, mask=wide)
        tl.store(BARRIER + lead, 0)
    if FAR:
        for plane in tl.static_range(3):
            wiped = BEST + (plane * tl.num_programs(1) + lead) * picks + which
            tl.store(wiped, tl.zeros((BC,), tl.int64), mask=which < picks)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _add_up(parts: Tensor, counts: Tensor, dtype: torch.dtype, mean: bool) -> tuple[Tensor, Tensor]:
    """(lead splits c d), (lead splits c) -> sums or means (lead c d) and the number of members (lead c)."""
    lead, splits, c, d = parts.shape
    out = torch.empty(lead, c, d, dtype=dtype, device=parts.device)
    total = torch.empty(lead, c, dtype=torch.int64, device=parts.device)
    few = min(32, power(splits, least=1))
    each = max(1, 64 // few)
    launch(
        add_up_kernel, (cdiv(c, each), lead), (parts, counts, out, total), (c, d, splits),
        MEAN=mean, BC=each, BS=few, BD=power(d), num_warps=4,
    )  # fmt: skip
    return out, total


def member_sums(x: Tensor, order: Tensor, first: Tensor, dtype: torch.dtype, mean: bool) -> tuple[Tensor, Tensor]:
    """Sums or means (b h c d) of the members of each cluster, and their number (b h c)."""
    (b, h, _, d), c = x.shape, first.shape[1] - 2
    out, total = _add_up(*member_kernels.sums(x, order, first), dtype, mean)
    return out.view(b, h, c, d), total.view(b, h, c)


def means(x: Tensor, member_of: Tensor, order: Tensor, first: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    return member_sums(x, order, first, x.dtype, mean=True)


class Begun(NamedTuple):
    """What starts leave for training."""

    centroids: Buffer  # (lead c d), relative to the origin
    origin: Tensor  # (lead 1 d)
    w: Tensor  # (lead c d), their side of the product
    offset: Tensor  # (lead c)
    barrier: Buffer  # (lead) zeros
    best: Buffer  # (3 lead picks) zeros


def _start(points: Tensor, at: Tensor, form: Tensor | None, signs: bool, picks: int = 0) -> Begun:
    """The points (b h n d) at positions (b h c) as centroids; picks: how many of them will be chosen, by distances that
    half precision would blur."""
    (b, h, _, d), c, device = points.shape, at.shape[2], points.device
    lead, tile, wide = b * h, 32, power(d)
    centroids, barrier, best = workspace(
        device, ((lead, c, d), torch.float32), ((lead,), torch.int32), ((3, lead, picks), torch.int64)
    )
    begun = Begun(
        centroids, torch.empty(lead, 1, d, dtype=torch.float32, device=device),
        torch.empty(lead, c, d, dtype=torch.float32 if picks else points.dtype, device=device),
        torch.empty(lead, c, dtype=torch.float32, device=device), barrier, best,
    )  # fmt: skip
    launch(
        start_kernel, (cdiv(c, tile), lead), (points, at, points if form is None else form, *begun),
        (d, c, min(c, FEW), h, picks, *points.stride()[:3], *at.stride()[:2]),
        HAS_FORM=form is not None, SIGNS=signs, FAR=picks > 0, BC=tile, BA=min(128, power(c)), BD=wide,
        BK=min(64, wide), num_warps=4,
    )  # fmt: skip
    return begun


def _positions(at: Tensor) -> Tensor:
    return at if at.stride(-1) == 1 else at.contiguous()


def farthest(points: Tensor, pool_at: Tensor, clusters: int, form: Tensor | None, signs: bool) -> Tensor:
    """Of the points (b h n d) at pool_at (b h p), the positions (lead c) of those that lie far apart."""
    points, pool_at = rows(points), _positions(pool_at)
    begun = _start(points, pool_at, _dense(form), False, clusters)
    return far(pool_at, begun.centroids, begun.w, begun.offset, begun.best, begun.barrier, points, clusters)


def kmeans(
    points: Tensor,
    valid: Tensor | None,
    start_at: Tensor,
    train_at: Tensor | None,
    form: Tensor | None,
    updates: int,
    signs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    points, form, start_at = rows(points), _dense(form), _positions(start_at)
    centroids, origin, w, offset, barrier, _ = _start(points, start_at, form, signs)
    if updates:
        train_at = None if train_at is None else _positions(train_at)
        valid = None if valid is None else valid.contiguous()
        _train(points, valid, start_at, train_at, form, origin, centroids, w, offset, barrier, updates, signs)
    return w, offset, origin


def _train(
    points: Tensor, valid: Tensor | None, start_at: Tensor, train_at: Tensor | None, form: Tensor | None,
    origin: Tensor, centroids: Tensor | Buffer, w: Tensor, offset: Tensor, barrier: Tensor | Buffer, updates: int,
    signs: bool,
) -> None:  # fmt: skip
    """In one launch, or stage by stage: with many rows each stage fills the device, and with many clusters sums over
    sorted members move less than a product with the labels."""
    few = len(w) * (points if train_at is None else train_at).shape[2] <= TOGETHER
    if few or fits(points, w.shape[1]):
        run = train if few else train_apart
        run(points, valid, start_at, train_at, form, origin, centroids, w, offset, barrier, updates, signs)
        return
    if train_at is not None:
        points, valid = rows_at(points, train_at), (train_at >= 0).flatten(0, 1)
    for _ in range(updates):
        labels = nearest(points, w, offset, None if signs else origin, signs)
        if valid is not None:
            labels = torch.where(valid, labels, -1)
        sums = member_kernels.sums(points, *member_kernels.by_label(labels, w.shape[1]))
        move(points, start_at, form, origin, centroids, w, offset, barrier, *sums, signs)


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
    """Euclidean k-means from given centroids (lead c d): no origin, no form, no signs."""
    points, b, h = rows(points), points.shape[0], points.shape[1]
    centroids = centroids.float().clone(memory_format=torch.contiguous_format)
    if points.numel() and centroids.numel() and updates:
        w, offset = centroids.to(points.dtype, copy=True), centroids.square().sum(-1).mul_(-0.5)
        offset.masked_fill_(~alive, float("-inf"))
        start_at = torch.where(alive, 0, -1).view(b, h, -1)  # who is alive is all that training reads of the starts
        origin = torch.zeros(b * h, 1, points.shape[3], dtype=torch.float32, device=points.device)
        barrier = torch.zeros(b * h, dtype=torch.int32, device=points.device)
        _train(points, valid.contiguous(), start_at, None, None, origin, centroids, w, offset, barrier, updates, False)
    return centroids
