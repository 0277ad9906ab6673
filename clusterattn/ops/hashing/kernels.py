"""Hashing and seating in few launches: tokens are read once in their own dtype, all orders come from one radix sort.

A sort key holds its segment (sequence, head, round) in the high bits and the score in the rest, so that one flat sort
of 32-bit numbers orders every segment of queries and keys at once. Scores keep the bits that are left, at least
LEAST_BITS: two that agree in all of them are neighbours either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import jit, power, precision, rows, tl
from .._launch import cdiv, launch

LEAST_BITS = 18
WIDEST = 8192  # numbers in a tile of rows


@jit
def _rows_of(X, lead, heads, at, dims, n, d, sxb, sxh, sxn):
    """A tile of rows of one head, in their own dtype."""
    return tl.load(
        X + (lead // heads) * sxb + (lead % heads) * sxh + at.to(tl.int64)[:, None] * sxn + dims[None, :],
        mask=(at < n)[:, None] & (dims < d)[None, :], other=0.0,
    )  # fmt: skip


@jit
def project_kernel(
    X, DRAWN, VALID, SCORES, NORMS, MOST, n, d, width, heads, sxb, sxh, sxn,
    LIFTED: tl.constexpr, HAS_VALID: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """All r projections of a tile of rows, and with LIFTED their squared norms and the largest of them in each head.

    MOST holds the bits of floats >= 0, which order as integers do: its atomic maximum is the same in any order.
    """
    lead = tl.program_id(1).to(tl.int64)
    at, dims = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD)
    x = _rows_of(X, lead, heads, at, dims, n, d, sxb, sxh, sxn).to(tl.float32)
    for one in tl.static_range(R):
        drawn = tl.load(DRAWN + one * width + dims, mask=dims < d, other=0.0)
        tl.store(SCORES + (lead * R + one) * n + at, tl.sum(x * drawn[None, :], 1), mask=at < n)
    if LIFTED:
        norm = tl.sum(x * x, 1)
        tl.store(NORMS + lead * n + at, norm, mask=at < n)
        if HAS_VALID:
            valid = tl.load(VALID + (lead // heads) * n + at, mask=at < n, other=0)
            norm = tl.where(valid != 0, norm, 0.0)
        tl.atomic_max(MOST + lead, tl.max(norm, 0).to(tl.int32, bitcast=True), sem="relaxed")


@jit
def lift_kernel(
    SCORES, NORMS, MINE, OTHERS, DRAWN, OUT, n, column, width, heads, group, other_group,
    R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scores for each query head: those of its own or its group's rows, moved along by the lift."""
    lead = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    mine = (lead // heads) * (heads // group) + (lead % heads) // group
    other = (lead // heads) * (heads // other_group) + (lead % heads) // other_group
    most = tl.load(MINE + mine).to(tl.float32, bitcast=True) + tl.load(OTHERS + other).to(tl.float32, bitcast=True)
    lift = tl.sqrt(tl.maximum(most - tl.load(NORMS + mine * n + at, mask=at < n, other=0.0), 0.0))
    for one in tl.static_range(R):
        score = tl.load(SCORES + (mine * R + one) * n + at, mask=at < n, other=0.0)
        score += tl.load(DRAWN + one * width + column) * lift
        tl.store(OUT + (lead * R + one) * n + at, score, mask=at < n)


@jit
def polytope_kernel(
    X, DRAWN, BUCKETS, HASHES, n, d, directions, rounds, heads, sxb, sxh, sxn,
    HAS_BUCKETS: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The direction with the largest product in absolute value, and its sign.

    Column and sign ride in the lowest bits of the product's magnitude: one integer maximum finds value and place.
    """
    lead = tl.program_id(1).to(tl.int64)
    at, dims, column = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BC)
    x = _rows_of(X, lead, heads, at, dims, n, d, sxb, sxh, sxn)
    half = directions
    if HAS_BUCKETS:
        half = ((tl.load(BUCKETS + lead // heads) + 1) // 2).to(tl.int32)
    for one in range(rounds):
        best, place = tl.full((BN,), -1, tl.int32), tl.zeros((BN,), tl.int32)
        for first in range(0, directions, BC):
            which = first + column
            drawn = tl.load(
                DRAWN + (one * directions + which)[:, None] * d + dims[None, :],
                mask=(which < directions)[:, None] & (dims < d)[None, :], other=0.0,
            )  # fmt: skip
            product = tl.dot(x, tl.trans(drawn), input_precision=PRECISION).to(tl.int32, bitcast=True)
            packed = (product & (0x80000000 - 2 * BC)) | ((BC - 1 - column)[None, :] + tl.where(product < 0, 0, BC))
            if HAS_BUCKETS or not EVEN:
                packed = tl.where((which < half)[None, :], packed, -1)
            top = tl.max(packed, 1)
            code = top & (2 * BC - 1)
            found = first + (BC - 1 - (code & (BC - 1))) + tl.where(code < BC, half, 0)
            better = (top | (2 * BC - 1)) > (best | (2 * BC - 1))
            place, best = tl.where(better | (first == 0), found, place), tl.maximum(best, top)
        tl.store(HASHES + (lead * rounds + one) * n + at, place, mask=at < n)


@jit
def pack_kernel(
    BY, VALID, OUT, first, segment, n, rows_each, step,
    BITS: tl.constexpr, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sort key of each number: its segment, then the number itself (BITS of a float, or an integer below step - 1);
    the padded ones last."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    by = tl.load(BY + row * n + at, mask=at < n, other=0)
    if BITS > 0:
        bits = by.to(tl.int32, bitcast=True)
        # negative floats order backwards: flip all their bits, and the sign bit of the others
        bits = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True).to(tl.int64)
        number = bits >> (32 - BITS)
    else:
        number = by.to(tl.int64)
    if HAS_VALID:
        valid = tl.load(VALID + (row // rows_each) * n + at, mask=at < n, other=0)
        number = tl.where(valid != 0, number, step - 1)
    key = (segment + row) * step + number
    tl.store(OUT + first + row * n + at, key.to(OUT.dtype.element_ty), mask=at < n)


@jit
def seat_kernel(
    INDEX, REAL, OTHER_REAL, TABLE, first, n, m, g, size, other_size, width, rows_each, shared,
    HAS_REAL: tl.constexpr, HAS_OTHER: tl.constexpr, BALANCED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The table (row g width) of the tokens in the order INDEX (row n). BALANCED: as many buckets as the side that
    needs more, filled evenly; otherwise chunks of ``size``, each with those before it as far as ``width`` reaches."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    batch = row // rows_each
    bucket, seat = (at // width).to(tl.int64), at % width
    real, other = n + batch * 0, m + batch * 0
    if HAS_REAL:
        real = tl.load(REAL + batch)
    if HAS_OTHER:
        other = tl.load(OTHER_REAL + batch)
    needed = (real + size - 1) // size
    if BALANCED:
        needed = tl.maximum(tl.maximum(needed, (other + other_size - 1) // other_size), 1)
        start, stop = bucket * real // needed, (bucket + 1) * real // needed
        stop = tl.maximum(stop, tl.minimum(start + shared, real))
        rank, here = start + seat, bucket < needed
    else:
        back = seat // size
        whose = bucket - back
        whose = tl.where(whose < 0, whose + needed, whose)
        rank, here = whose * size + seat % size, (bucket < needed) & (back < needed)
        stop = tl.minimum((whose + 1) * size, real)
    taken = here & (rank < stop) & (at < g * width)
    base = first + row * n
    token = tl.load(INDEX + base + tl.where(taken, rank, 0)) - base
    tl.store(TABLE + row * g * width + at, tl.where(taken, token, -1), mask=at < g * width)


@jit
def unit_kernel(X, DY, OUT, n, d, heads, sxb, sxh, sxn, BACKWARD: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Rows of length 1; BACKWARD: the gradient of x from that of the unit rows."""
    lead = tl.program_id(1).to(tl.int64)
    at, dims = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD)
    x = _rows_of(X, lead, heads, at, dims, n, d, sxb, sxh, sxn).to(tl.float32)
    norm = tl.sqrt(tl.sum(x * x, 1))
    safe = tl.maximum(norm, 1e-12)
    out = x / safe[:, None]
    to = (lead * n + at)[:, None] * d + dims[None, :]
    mask = (at < n)[:, None] & (dims < d)[None, :]
    if BACKWARD:
        dy = tl.load(DY + to, mask=mask, other=0.0).to(tl.float32)
        along = tl.where(norm > 1e-12, tl.sum(out * dy, 1), 0.0)
        out = (dy - out * along[:, None]) / safe[:, None]
    tl.store(OUT + to, out.to(OUT.dtype.element_ty), mask=mask)


def _flags(valid: Tensor | None, like: Tensor) -> Tensor:
    """A mask as kernels read it."""
    return like if valid is None else valid.contiguous().view(torch.int8)


def scores(
    q: Tensor, k: Tensor, drawn: Tensor, valid_q: Tensor | None, valid_k: Tensor | None, lifted: bool
) -> tuple[Tensor, Tensor]:
    (b, h), (r, width), group = q.shape[:2], drawn.shape, q.shape[1] // k.shape[1]
    drawn = drawn.float().contiguous()
    most = torch.zeros(2, b * h if lifted else 0, dtype=torch.int32, device=q.device)
    found = []
    for x, valid, mine in ((rows(q), valid_q, most[0]), (rows(k), valid_k, most[1])):
        _, heads, n, d = x.shape
        score = torch.empty(b, heads, r, n, dtype=torch.float32, device=x.device)
        norm = torch.empty(b, heads, n if lifted else 0, dtype=torch.float32, device=x.device)
        tile = WIDEST // power(d)
        launch(
            project_kernel, (cdiv(n, tile), b * heads), (x, drawn, _flags(valid, x), score, norm, mine),
            (n, d, width, heads, *x.stride()[:3]),
            LIFTED=lifted, HAS_VALID=valid is not None, R=r, BN=tile, BD=power(d), num_warps=4,
        )  # fmt: skip
        found.append((score, norm))
    if not lifted:
        return found[0][0], found[1][0] if group == 1 else found[1][0].repeat_interleave(group, 1)
    d, lifts = q.shape[-1], []
    for (score, norm), mine, others, groups, column in (
        (found[0], most[0], most[1], (1, group), d + 1), (found[1], most[1], most[0], (group, 1), d),
    ):  # fmt: skip
        n = score.shape[3]
        out = torch.empty(b, h, r, n, dtype=torch.float32, device=q.device)
        launch(
            lift_kernel, (cdiv(n, 1024), b * h), (score, norm, mine, others, drawn, out),
            (n, column, width, h, *groups), R=r, BN=1024, num_warps=4,
        )  # fmt: skip
        lifts.append(out)
    return lifts[0], lifts[1]


def polytope(x: Tensor, drawn: Tensor, buckets: Tensor | None) -> Tensor:
    x, drawn = rows(x), drawn.to(x.dtype).contiguous()
    (b, h, n, d), (rounds, each) = x.shape, drawn.shape[:2]
    hashes = torch.empty(b, h, rounds, n, dtype=torch.int32, device=x.device)
    half = x.dtype != torch.float32
    tile, columns, warps = (128, 128, 8) if half and d <= 128 else (64, 64, 4)
    columns = min(columns, power(each))
    launch(
        polytope_kernel, (cdiv(n, tile), b * h),
        (x, drawn, buckets.reshape(-1).contiguous() if buckets is not None else x, hashes),
        (n, d, each, rounds, h, *x.stride()[:3]),
        HAS_BUCKETS=buckets is not None, EVEN=each % columns == 0, BN=tile, BD=power(d), BC=columns,
        PRECISION=precision(x), num_warps=warps,
    )  # fmt: skip
    return hashes


def _order(numbers: list[Tensor], valid: list[Tensor | None], limit: int) -> tuple[Tensor, list[int]]:
    """The stable order of each row (b h r n) of each tensor of numbers, the padded ones last, by one flat sort.

    -> positions in the flat sequence of all rows, and where each tensor's rows begin. ``limit``: integers are below it;
    0: the numbers are floats.
    """
    total, segments = sum(x.numel() for x in numbers), sum(x.shape[:3].numel() for x in numbers)
    taken = max(segments - 1, 1).bit_length()
    if limit:
        step, kind = limit + 1, torch.int64
        for small in (torch.int32, torch.int16):
            kind = small if segments * step <= torch.iinfo(small).max else kind
        bits = 0
    else:
        bits, kind = (31 - taken, torch.int32) if 31 - taken >= LEAST_BITS else (32, torch.int64)
        step = 1 << bits
    keys = torch.empty(total, dtype=kind, device=numbers[0].device)
    starts, segment, start = [], 0, 0
    for x, real in zip(numbers, valid, strict=True):
        b, h, r, n = x.shape
        launch(
            pack_kernel, (b * h * r, cdiv(n, 1024)), (x.contiguous(), _flags(real, x), keys),
            (start, segment, n, h * r, step),
            BITS=bits, HAS_VALID=real is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
        starts.append(start)
        start, segment = start + x.numel(), segment + b * h * r
    return keys.sort(stable=True).indices, starts


def _counts(valid: Tensor | None) -> Tensor | None:
    return None if valid is None else valid.sum(-1)


def _seat(
    order: Tensor, first: int, by: Tensor, real: Tensor | None, other_real: Tensor | None, m: int,
    g: int, size: int, other_size: int, width: int, shared: int, balanced: bool,
) -> Tensor:  # fmt: skip
    b, h, r, n = by.shape
    table = torch.empty(b, h, r * g, width, dtype=torch.int64, device=by.device)
    launch(
        seat_kernel, (b * h * r, cdiv(g * width, 1024)),
        (order, real if real is not None else order, other_real if other_real is not None else order, table),
        (first, n, m, g, size, other_size, width, h * r, shared),
        HAS_REAL=real is not None, HAS_OTHER=other_real is not None, BALANCED=balanced, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return table


def balanced(
    score_q: Tensor, score_k: Tensor, valid_q: Tensor | None, valid_k: Tensor | None, q_seats: int, k_seats: int
) -> tuple[Tensor, Tensor]:
    n, m = score_q.shape[3], score_k.shape[3]
    hashed = not score_q.is_floating_point()
    g = max(-(-n // q_seats), -(-m // k_seats), 1)
    order, (q_first, k_first) = _order([score_q, score_k], [valid_q, valid_k], g + 2 if hashed else 0)
    real_q, real_k = _counts(valid_q), _counts(valid_k)
    return (
        _seat(order, q_first, score_q, real_q, real_k, m, g, q_seats, k_seats, min(q_seats, n), 0, True),
        _seat(order, k_first, score_k, real_k, real_q, n, g, k_seats, q_seats, min(k_seats, m), 1, True),
    )


def chunked(hashes: Tensor, valid: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    n, real = hashes.shape[3], _counts(valid)
    g = max(-(-n // chunk), 1)
    order, (first,) = _order([hashes], [valid], g + 2)
    mine, seen = (_seat(order, first, hashes, real, None, 0, g, chunk, 1, w, 0, False) for w in (chunk, 2 * chunk))
    return mine, seen


def unit(x: Tensor) -> Tensor:
    return _unit(x, x, False)


def unit_backward(d_unit: Tensor, x: Tensor) -> Tensor:
    return _unit(x, d_unit.contiguous(), True)


def _unit(x: Tensor, dy: Tensor, backward: bool) -> Tensor:
    x = rows(x)
    b, h, n, d = x.shape
    out = torch.empty(b, h, n, d, dtype=x.dtype, device=x.device)
    tile = WIDEST // power(d) // 2
    launch(
        unit_kernel, (cdiv(n, tile), b * h), (x, dy, out), (n, d, h, *x.stride()[:3]),
        BACKWARD=backward, BN=tile, BD=power(d), num_warps=4,
    )  # fmt: skip
    return out
