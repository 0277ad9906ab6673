"""The nearest centroid of everybody: a product on tensor cores whose largest column is found in registers.

Products are a third of the work; the rest is to find the column. In half precision a score gives its last bits to the
number of its column, so that a maximum is all that is left to take: two instructions for a score where a search that
carries an index along takes seven. Scores that differ in those bits alone are equally good: inputs are rounded coarser.
Those of codes are whole numbers: the product makes them so large that the column goes below, and nothing is lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._jit import INTERPRETING, in_turn, jit, power, precision, rows, tl
from .._launch import cdiv, launch
from .train_kernels import side_of_codes, together

TILE = 64  # rows that meet centroids which stay where they are
WHOLE = 256  # that do: in shared memory, and their scores in registers

if INTERPRETING:

    @jit
    def carrying(bits, kept, number):
        lowest = tl.where(bits == -0x800000, -0x800001, bits)  # -inf: numpy takes some NaNs for a maximum
        return (lowest & kept) | number

else:

    @jit
    def carrying(bits, kept, number):
        """(bits & kept) | number: one instruction, of which the compiler would make two."""
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [bits, kept, number], dtype=tl.int32, is_pure=True, pack=1
        )


@jit
def highest_of(scores, BN: tl.constexpr, BC: tl.constexpr):
    """The highest of each row of scores (BN BC), but for its last bits, and its column. Columns are told apart in two
    steps: those eight apart lie in one thread, where their numbers are constants. Scores of -inf may become NaN there,
    which no maximum takes."""
    bits = tl.reshape(scores, (BN, BC // 8, 8)).to(tl.int32, bitcast=True)
    bits = carrying(bits, -BC, (8 * tl.arange(0, BC // 8))[None, :, None])
    few = tl.max(bits.to(tl.float32, bitcast=True), axis=1).to(tl.int32, bitcast=True) | tl.arange(0, 8)[None, :]
    highest = tl.max(few.to(tl.float32, bitcast=True), axis=1)
    return highest, highest.to(tl.int32, bitcast=True) & (BC - 1)


@jit
def highest_of_codes(scores, BC: tl.constexpr):
    """The highest of each row of scores that ``side_of_codes`` has numbered, and its column."""
    highest = tl.max(scores, axis=1)
    whole = tl.where(highest > float("-inf"), highest, 0.0).to(tl.int32)
    return highest, (-whole) & (BC - 1)


@jit
def nearest_kernel(
    X, ORIGIN, W, OFFSET, LABELS, n, d, c, heads, sxb, sxh, sxn,
    HAS_ORIGIN: tl.constexpr, NUMBERED: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Centroids block by block. NUMBERED: scores carry their columns; otherwise ties go to the lowest."""
    in_turn()
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
        if NUMBERED:
            highest, index = highest_of(scores, BN, BC)
        else:
            highest, index = tl.max(scores, axis=1, return_indices=True)
        label = tl.where(highest > best, index + first, label)
        best = tl.maximum(best, highest)
    tl.store(LABELS + lead * n + at, label.to(tl.int64), mask=real)


@jit
def nearest_whole_kernel(
    X, ORIGIN, W, OFFSET, LABELS, n, d, c, heads, stretch, sxb, sxh, sxn,
    SIGNS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Up to BC centroids, which stay in shared memory while a stretch of rows passes. SIGNS: rows are codes."""
    in_turn()
    lead = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BD)
    wide, which = dims < d, tl.minimum(tl.arange(0, BC), c - 1)  # the last one again, where there are fewer
    base = X + (lead // heads) * sxb + (lead % heads) * sxh
    w = tl.load(W + (lead * c + which[:, None]) * d + dims[None, :], mask=wide[None, :], other=0.0)
    offset = tl.load(OFFSET + lead * c + which)
    if SIGNS:
        w, offset = side_of_codes(w, offset, which, BC)
    else:
        origin = tl.load(ORIGIN + lead * d + dims, mask=wide, other=0.0)[None, :]
    low = tl.program_id(0) * stretch
    for start in tl.range(low, min(n, low + stretch), BN, num_stages=2):
        at = start + tl.arange(0, BN)
        real = at < n
        x = tl.load(
            base + at.to(tl.int64)[:, None] * sxn + dims[None, :], mask=real[:, None] & wide[None, :], other=0.0
        )
        if SIGNS:
            highest, label = highest_of_codes(tl.dot(x, tl.trans(w)) + offset[None, :], BC)
        else:
            x = (x.to(tl.float32) - origin).to(x.dtype)
            if BC > 64:  # read again for each tile: kept, they would take the registers of another program
                offset = tl.load(OFFSET + lead * c + which)
            highest, label = highest_of(tl.dot(x, tl.trans(w)) + offset[None, :], BN, BC)
        label = tl.where(highest > float("-inf"), tl.minimum(label, c - 1), 0)
        tl.store(LABELS + lead * n + at, label.to(tl.int64), mask=real)


def numbered(points: Tensor, origin: Tensor | None) -> bool:
    """May scores give up their last bits? Not those of directions, which have no origin, nor exact ones."""
    return points.element_size() == 2 and origin is not None


def nearest(points: Tensor, right: Tensor, offset: Tensor, origin: Tensor | None, signs: bool = False) -> Tensor:
    """points (b h n d), right (lead c d), offset (lead c), origin (lead 1 d) -> labels (lead n). signs: points are
    codes."""
    points, right = rows(points), right.to(points.dtype).contiguous()
    origin, offset = None if origin is None else origin.float().contiguous(), offset.float().contiguous()
    (b, h, n, d), c = points.shape, right.shape[1]
    labels = torch.zeros if 0 in (points.numel(), c) else torch.empty
    found = labels(b * h, n, dtype=torch.int64, device=points.device)
    if found.numel() == 0 or c == 0:
        return found
    tensors = points, origin if origin is not None else right, right, offset, found
    if (numbered(points, origin) or (signs and points.element_size() == 2)) and c <= WHOLE and power(d) <= 128:
        full = power(c) == WHOLE
        each = 2 if power(d) > 64 or (full and d < power(d)) else 3 if full else 4  # masks of rows take registers
        programs, stretch = spread(n, b * h, points, each)
        launch(
            nearest_whole_kernel, (programs, b * h), tensors, (n, d, c, h, stretch, *points.stride()[:3]),
            SIGNS=signs, BN=TILE, BD=power(d), BC=power(c), num_warps=4, **crowded(points, each),
        )  # fmt: skip
        return found
    tiles = _tiles(points, c)
    launch(
        nearest_kernel, (cdiv(n, tiles["BN"]), b * h), tensors, (n, d, c, h, *points.stride()[:3]),
        HAS_ORIGIN=origin is not None, NUMBERED=numbered(points, origin), PRECISION=precision(points), num_warps=4,
        **tiles,
    )  # fmt: skip
    return found


def spread(n: int, lead: int, x: Tensor, each: int) -> tuple[int, int]:
    """How many programs share the n rows of a head, ``each`` to a multiprocessor, and how many rows one takes."""
    stretch = cdiv(cdiv(n, together(cdiv(n, TILE), lead, x.device, each)), TILE) * TILE
    return cdiv(n, stretch), stretch


def crowded(x: Tensor, each: int) -> dict[str, Any]:
    """A limit of registers, so that as many programs of four warps share a multiprocessor."""
    return {"maxnreg": {2: 255, 3: 168, 4: 128}[each]} if x.is_cuda else {}


def _tiles(points: Tensor, clusters: int) -> dict[str, int]:
    """Rows and centroids of a tile, by the width of a row: what shared memory has room for."""
    wide = power(points.shape[-1])
    rows = 128 if points.element_size() == 2 or wide <= 64 else 64 if wide <= 128 else 32
    return {"BN": rows, "BC": min(32, power(clusters)), "BD": wide, "num_stages": 3 if rows > 32 else 1}
