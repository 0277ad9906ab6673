"""k-means on its sample in one launch: several programs share a head and meet at barriers between the phases.

Phase 2i assigns every program's stretch of rows and adds them up by cluster, as a product with the labels; phase 2i + 1
moves every program's share of the centroids. Sums are added up in the order of the programs: the same inputs give the
same bits. The programs of a launch must all run at the same time: there are no more of them than multiprocessors, and
the launch is a cooperative one. Where that cannot be (Triton's interpreter), each phase is a launch.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .._jit import INTERPRETING, in_turn, jit, power, precision, tl
from .._launch import Buffer, cdiv, launch, workspace

STRIP = 16  # centroids that a program moves at once
FILL, TILE = 2, 64  # programs to a multiprocessor where none waits for others, and the rows of their tiles


@jit
def meet(BARRIER, lead, target):
    """Wait until ``target`` programs of this head have come by; what they wrote before is seen after."""
    tl.debug_barrier()
    seen = tl.atomic_add(BARRIER + lead, 1, sem="acq_rel", scope="gpu") + 1
    while seen < target:
        seen = tl.atomic_add(BARRIER + lead, 0, sem="acq_rel", scope="gpu")
    tl.debug_barrier()


@jit
def sample_rows(
    X, AT, VALID, lead, heads, at, stop, dims, d, n, sxb, sxh, sxn, stb, sth,
    HAS_AT: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """The rows of the sample at ``at``, and which of them are real."""
    real, row = at < stop, at.to(tl.int64)
    if HAS_AT:
        row = tl.load(AT + (lead // heads) * stb + (lead % heads) * sth + at, mask=real, other=-1)
        real = row >= 0
    if HAS_VALID:
        real = real & (tl.load(VALID + lead * n + row, mask=real, other=0) != 0)
    x = tl.load(
        X + (lead // heads) * sxb + (lead % heads) * sxh + row[:, None] * sxn + dims[None, :],
        mask=real[:, None] & (dims < d)[None, :], other=0.0,
    )  # fmt: skip
    return x, real


@jit
def _centroids(W, OFFSET, lead, which, dims, c, d):
    """Their side of the product, as others wrote it in this launch."""
    w = tl.load(
        W + (lead * c + which[:, None]) * d + dims[None, :], mask=(which < c)[:, None] & (dims < d)[None, :],
        other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    return w, tl.load(OFFSET + lead * c + which, mask=which < c, other=float("-inf"), cache_modifier=".cg")


@jit
def _best(x, W, OFFSET, lead, c, d, dims, BN: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """The nearest centroid of each row; ties go to the lowest."""
    best, label = tl.full((BN,), float("-inf"), tl.float32), tl.zeros((BN,), tl.int32)
    for first in range(0, c, BC):
        w, offset = _centroids(W, OFFSET, lead, first + tl.arange(0, BC), dims, c, d)
        scores = tl.dot(x, tl.trans(w), input_precision=PRECISION) + offset[None, :]
        highest, index = tl.max(scores, axis=1, return_indices=True)
        label = tl.where(highest > best, index + first, label)
        best = tl.maximum(best, highest)
    return label


@jit
def side_of_codes(w, offset, which, BC: tl.constexpr):
    """Centroids' side of a product with codes, whose scores are whole numbers: times BC and less the index no two are
    the same, and of equals the lowest is largest."""
    return (w.to(tl.float32) * BC).to(w.dtype), offset - which


@jit
def _hot(chosen, like):
    """1 where chosen, 0 elsewhere, by a selection: conversions are slow."""
    dtype: tl.constexpr = like.dtype
    return tl.where(chosen, tl.full((), 1.0, dtype), tl.full((), 0.0, dtype))


@jit
def _add_stretch(
    X, AT, VALID, W, OFFSET, SUMS, COUNTS, lead, heads, first_row, stop, out, origin, dims,
    n, d, c, sxb, sxh, sxn, stb, sth, HAS_AT: tl.constexpr, HAS_VALID: tl.constexpr, SIGNS: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of a stretch of rows by their nearest centroids, of which there are no more than BC: rows are read once,
    and sums stay in registers."""
    which = tl.arange(0, BC)
    w, offset = _centroids(W, OFFSET, lead, which, dims, c, d)
    total, count = tl.zeros((BC, BD), tl.float32), tl.zeros((BC,), tl.float32)
    if SIGNS:
        w, offset = side_of_codes(w, offset, which, BC)
        counts, ones = tl.zeros((BC, 16), tl.float32), tl.full((BN, 16), 1.0, X.dtype.element_ty)
    for start in range(first_row, stop, BN):
        at = start + tl.arange(0, BN)
        x, real = sample_rows(
            X, AT, VALID, lead, heads, at, stop, dims, d, n, sxb, sxh, sxn, stb, sth, HAS_AT, HAS_VALID
        )
        if SIGNS:  # rows down: a thread has most of a row's scores, and tensor cores count as well as add
            scores = tl.dot(x, tl.trans(w), input_precision=PRECISION) + offset[None, :]
            highest = tl.where(real, tl.max(scores, axis=1), float("inf"))  # no score is
            chosen = tl.trans(_hot(scores == highest[:, None], x))
            counts = tl.dot(chosen, ones, counts, input_precision=PRECISION)
        else:
            # centroids down, rows across: the labels' one-hot matrix then lies as the next product takes it
            moved = (x.to(tl.float32) - origin[None, :]).to(x.dtype)
            scores = tl.dot(w, tl.trans(moved), input_precision=PRECISION) + offset[:, None]
            label = tl.where(real, tl.argmax(scores, axis=0), -1)
            chosen = which[:, None] == label[None, :]
            count += tl.sum(_hot(chosen, count), 1)
            chosen = _hot(chosen, x)
        total = tl.dot(chosen, x, total, input_precision=PRECISION)
    if SIGNS:
        count = tl.max(counts, 1)
    place = out + which
    tl.store(SUMS + place[:, None] * d + dims[None, :], total, mask=(which < c)[:, None] & (dims < d)[None, :])
    tl.store(COUNTS + place, count, mask=which < c)


@jit
def round_kernel(
    X, TRAIN_AT, VALID, ORIGIN, W, OFFSET, SUMS, COUNTS,
    n, d, c, taken, heads, programs, stretch, sxb, sxh, sxn, stb, sth,
    HAS_AT: tl.constexpr, HAS_VALID: tl.constexpr, SIGNS: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The first phase of one round alone: SUMS (lead programs c d), COUNTS (lead programs c)."""
    in_turn()
    mine, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BD)
    origin = tl.load(ORIGIN + lead * d + dims, mask=dims < d, other=0.0)
    first_row, out = mine * stretch, (lead * programs + mine) * c
    _add_stretch(
        X, TRAIN_AT, VALID, W, OFFSET, SUMS, COUNTS, lead, heads, first_row, min(taken, first_row + stretch), out,
        origin, dims, n, d, c, sxb, sxh, sxn, stb, sth, HAS_AT, HAS_VALID, SIGNS, BN, BC, BD, PRECISION,
    )  # fmt: skip


@jit
def seen_by(CENTROIDS, FORM, lead, which, dims, c, d, STRIP: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr):
    """Centroids that lie in memory, as the metric sees them: c S."""
    seen = tl.zeros((STRIP, BD), tl.float32)
    for first in range(0, d, BK):
        along = first + tl.arange(0, BK)
        piece = tl.load(
            CENTROIDS + (lead * c + which[:, None]) * d + along[None, :],
            mask=(which < c)[:, None] & (along < d)[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        form = tl.load(
            FORM + (lead * d + along[:, None]) * d + dims[None, :], mask=(along < d)[:, None] & (dims < d)[None, :],
            other=0.0,
        )  # fmt: skip
        seen = tl.dot(piece, form, seen, input_precision="tf32x3")  # as good as fp32, on tensor cores
    return seen


@jit
def train_kernel(
    X, START_AT, TRAIN_AT, VALID, FORM, ORIGIN, CENTROIDS, W, OFFSET, LABELS, SUMS, COUNTS, BARRIER,
    n, d, c, taken, heads, programs, stretch, share, begin, end, sxb, sxh, sxn, sab, sah, stb, sth,
    HAS_AT: tl.constexpr, HAS_VALID: tl.constexpr, HAS_FORM: tl.constexpr, SIGNS: tl.constexpr, ONE_BLOCK: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, STRIP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Phases begin .. end. SUMS (lead programs c d), COUNTS (lead programs c), LABELS (lead taken)."""
    in_turn()
    mine, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BD)
    origin = tl.load(ORIGIN + lead * d + dims, mask=dims < d, other=0.0)
    first_row = mine * stretch
    stop = min(taken, first_row + stretch)
    out = (lead * programs + mine) * c
    for phase in range(begin, end):
        if phase % 2 == 0:
            if ONE_BLOCK:
                _add_stretch(
                    X, TRAIN_AT, VALID, W, OFFSET, SUMS, COUNTS, lead, heads, first_row, stop, out, origin, dims,
                    n, d, c, sxb, sxh, sxn, stb, sth, HAS_AT, HAS_VALID, SIGNS, BN, BC, BD, PRECISION,
                )  # fmt: skip
            else:
                for start in range(first_row, stop, BN):
                    at = start + tl.arange(0, BN)
                    x, real = sample_rows(
                        X, TRAIN_AT, VALID, lead, heads, at, stop, dims, d, n, sxb, sxh, sxn, stb, sth,
                        HAS_AT, HAS_VALID,
                    )  # fmt: skip
                    if not SIGNS:
                        x = (x.to(tl.float32) - origin[None, :]).to(x.dtype)
                    label = tl.where(real, _best(x, W, OFFSET, lead, c, d, dims, BN, BC, PRECISION), -1)
                    tl.store(LABELS + lead * taken + at, label, mask=at < stop)
                tl.debug_barrier()
                for first in range(0, c, BC):
                    which = first + tl.arange(0, BC)
                    total, count = tl.zeros((BC, BD), tl.float32), tl.zeros((BC,), tl.float32)
                    for start in range(first_row, stop, BN):
                        at = start + tl.arange(0, BN)
                        x, real = sample_rows(
                            X, TRAIN_AT, VALID, lead, heads, at, stop, dims, d, n, sxb, sxh, sxn, stb, sth, HAS_AT,
                            HAS_VALID,
                        )  # fmt: skip
                        label = tl.load(LABELS + lead * taken + at, mask=at < stop, other=-1)
                        chosen = which[:, None] == label[None, :]
                        total = tl.dot(_hot(chosen, x), x, total, input_precision=PRECISION)
                        count += tl.sum(_hot(chosen, count), 1)
                    place = out + which
                    tl.store(
                        SUMS + place[:, None] * d + dims[None, :], total,
                        mask=(which < c)[:, None] & (dims < d)[None, :],
                    )  # fmt: skip
                    tl.store(COUNTS + place, count, mask=which < c)
        else:
            for first in range(mine * share, min(c, (mine + 1) * share), STRIP):
                which = first + tl.arange(0, STRIP)
                here, mask = which < c, (which < c)[:, None] & (dims < d)[None, :]
                total, count = tl.zeros((STRIP, BD), tl.float32), tl.zeros((STRIP,), tl.float32)
                for start in range(0, programs, BS):
                    part = start + tl.arange(0, BS)
                    row = (lead * programs + part[None, :]) * c + which[:, None]
                    there = (part < programs)[None, :] & here[:, None]
                    total += tl.sum(
                        tl.load(
                            SUMS + row[:, :, None] * d + dims[None, None, :],
                            mask=there[:, :, None] & (dims < d)[None, None, :], other=0.0, cache_modifier=".cg",
                        ), 1,
                    )  # fmt: skip
                    count += tl.sum(tl.load(COUNTS + row, mask=there, other=0.0, cache_modifier=".cg"), 1)
                place = (lead * c + which[:, None]) * d + dims[None, :]
                centroid = tl.load(CENTROIDS + place, mask=mask, other=0.0)
                if SIGNS:
                    mean = tl.where(total > 0, 1.0, -1.0)
                else:
                    mean = total / tl.maximum(count, 1.0)[:, None] - origin[None, :]
                centroid = tl.where((count > 0)[:, None] & mask, mean, centroid)  # an empty cluster keeps its place
                tl.store(CENTROIDS + place, centroid, mask=mask)
                seen = centroid
                if HAS_FORM:
                    tl.debug_barrier()
                    seen = seen_by(CENTROIDS, FORM, lead, which, dims, c, d, STRIP, BD, BK)
                offset = tl.zeros((STRIP,), tl.float32)
                if not SIGNS:
                    offset = -0.5 * tl.sum(centroid * seen, axis=1)
                starts = START_AT + (lead // heads) * sab + (lead % heads) * sah
                alive = tl.load(starts + which, mask=here, other=-1) >= 0
                tl.store(W + place, seen.to(W.dtype.element_ty), mask=mask)
                tl.store(OFFSET + lead * c + which, tl.where(alive, offset, float("-inf")), mask=here)
        if phase + 1 < end:
            meet(BARRIER, lead, programs * (phase - begin + 1))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs surely run at the same time. The interpreter runs one after another: any number will do."""
    return 6 if INTERPRETING else torch.cuda.get_device_properties(device).multi_processor_count


def together(programs: int, lead: int, device: torch.device, each: int = 1) -> int:
    """How many programs may share a head, when all of all heads run at the same time, ``each`` to a multiprocessor."""
    return max(1, min(programs, each * multiprocessors(device) // max(lead, 1)))


class PhaseTiles(NamedTuple):
    """How a program of the one launch works."""

    rows: int
    block: int  # centroids
    warps: int
    each: int  # programs to a multiprocessor, which must all run at the same time


def _tiles(points: Tensor, clusters: int) -> PhaseTiles:
    """Rows and centroids of a tile: more would not stay in registers."""
    wide, half = power(points.shape[3]), points.element_size() == 2
    block = min(power(clusters), max(16, (16384 if half else 2048) // wide))
    if fits(points, clusters) or (half and wide <= 128 and clusters <= 64):
        return PhaseTiles(64, block, 4, 2)  # half as many threads hold it as well: more programs share the rows
    return PhaseTiles(64 if wide <= 128 else 32, block, 8, 1)


def train(
    points: Tensor, valid: Tensor | None, start_at: Tensor, train_at: Tensor | None, form: Tensor | None,
    origin: Tensor, centroids: Tensor | Buffer, w: Tensor, offset: Tensor, barrier: Tensor | Buffer, updates: int,
    signs: bool,
) -> None:  # fmt: skip
    """``updates`` rounds over the points (b h n d) at train_at (b h s), or over all valid (lead n) ones: the centroids
    (lead c d), their side w of the product and their offset (lead c) move in place. barrier (lead): zeros."""
    (b, h, n, d), c, device = points.shape, start_at.shape[2], points.device
    lead = b * h
    rows = n if train_at is None else train_at.shape[2]
    wide = power(d)
    tile, block, warps, each = _tiles(points, c)
    programs = together(cdiv(rows, tile), lead, device, each)
    stretch = cdiv(cdiv(rows, programs), tile) * tile
    programs = cdiv(rows, stretch)
    share = cdiv(cdiv(c, programs), STRIP) * STRIP
    one = c <= block
    labels, sums, counts = workspace(
        device, ((lead, 1 if one else rows), torch.int32), ((lead, programs, c, d), torch.float32),
        ((lead, programs, c), torch.float32),
    )  # fmt: skip
    tensors = (
        points, start_at, train_at if train_at is not None else start_at, points if valid is None else valid,
        points if form is None else form, origin, centroids, w, offset, labels, sums, counts, barrier,
    )  # fmt: skip
    train_strides = (0, 0) if train_at is None else train_at.stride()[:2]
    strides = (*points.stride()[:3], *start_at.stride()[:2], *train_strides)
    phases = 2 * updates
    spans = [(phase, phase + 1) for phase in range(phases)] if INTERPRETING else [(0, phases)]
    for begin, end in spans:
        launch(
            train_kernel, (programs, lead), tensors,
            (n, d, c, rows, h, programs, stretch, share, begin, end, *strides),
            HAS_AT=train_at is not None, HAS_VALID=train_at is None and valid is not None, HAS_FORM=form is not None,
            SIGNS=signs, ONE_BLOCK=one, BN=tile, BC=block, BS=min(4, power(programs, least=1)), BD=wide,
            BK=min(64, wide), STRIP=STRIP, PRECISION=precision(points), num_warps=warps, num_stages=1,
            launch_cooperative_grid=programs > 1,
        )  # fmt: skip


def fits(points: Tensor, clusters: int) -> bool:
    """Whether a program can hold the sums of all clusters, and two programs a multiprocessor: many rows are read once
    in each round then."""
    return points.element_size() == 2 and power(points.shape[3]) <= 64 and power(clusters) <= 128


def train_apart(
    points: Tensor, valid: Tensor | None, start_at: Tensor, train_at: Tensor | None, form: Tensor | None,
    origin: Tensor, centroids: Tensor | Buffer, w: Tensor, offset: Tensor, barrier: Tensor | Buffer, updates: int,
    signs: bool,
) -> None:  # fmt: skip
    """As ``train``, in two launches for each round: as many programs as fill the device, and none waits for others. For
    clusters that fit."""
    (b, h, n, d), c, device = points.shape, start_at.shape[2], points.device
    lead, rows = b * h, n if train_at is None else train_at.shape[2]
    programs = together(cdiv(rows, TILE), lead, device, FILL)
    stretch = cdiv(cdiv(rows, programs), TILE) * TILE
    programs = cdiv(rows, stretch)
    sums, counts = workspace(device, ((lead, programs, c, d), torch.float32), ((lead, programs, c), torch.float32))
    tensors = (
        points, start_at if train_at is None else train_at, points if valid is None else valid, origin, w, offset,
        sums, counts,
    )  # fmt: skip
    train_strides = (0, 0) if train_at is None else train_at.stride()[:2]
    settings = {"num_warps": 4, "num_stages": 3} if signs else {"num_warps": 8, "num_stages": 1, "maxnreg": 128}
    for _ in range(updates):
        launch(
            round_kernel, (programs, lead), tensors,
            (n, d, c, rows, h, programs, stretch, *points.stride()[:3], *train_strides),
            HAS_AT=train_at is not None, HAS_VALID=train_at is None and valid is not None, SIGNS=signs, BN=TILE,
            BC=power(c), BD=power(d), PRECISION=precision(points), **settings,
        )  # fmt: skip
        move(points, start_at, form, origin, centroids, w, offset, barrier, sums, counts, signs)


def move(
    points: Tensor, start_at: Tensor, form: Tensor | None, origin: Tensor, centroids: Tensor | Buffer, w: Tensor,
    offset: Tensor, barrier: Tensor | Buffer, sums: Tensor | Buffer, counts: Tensor | Buffer, signs: bool,
) -> None:  # fmt: skip
    """One update alone, at which nobody waits, from sums (lead splits c d) and counts (lead splits c) of others."""
    (b, h, n, d), c, splits, wide = points.shape, start_at.shape[2], sums.shape[1], power(points.shape[3])
    tensors = (
        points, start_at, start_at, points, points if form is None else form, origin, centroids, w, offset, barrier,
        sums, counts, barrier,
    )  # fmt: skip
    strides = (*points.stride()[:3], *start_at.stride()[:2], 0, 0)
    strip, most = (STRIP, 8) if form is not None else (STRIP // 2, 16)  # a product wants no less
    launch(
        train_kernel, (cdiv(c, strip), b * h), tensors, (n, d, c, n, h, splits, n, strip, 1, 2, *strides),
        HAS_AT=False, HAS_VALID=False, HAS_FORM=form is not None, SIGNS=signs, ONE_BLOCK=True, BN=16, BC=16,
        BS=min(most if wide <= 64 else 4, power(splits, least=1)), BD=wide, BK=min(64, wide), STRIP=strip,
        PRECISION=precision(points), num_warps=4, num_stages=1,
    )  # fmt: skip
