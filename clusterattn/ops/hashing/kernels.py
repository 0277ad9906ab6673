"""Hashing and seating in few launches: tokens are read once in their own dtype, all orders come from one radix sort.

A sort key holds its segment (sequence, head, round) in the high bits and the score in the rest, so that one flat sort
of 32-bit numbers orders every segment of queries and keys at once. Scores keep the bits that are left, at least
LEAST_BITS: two that agree in all of them are neighbours either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import in_turn, jit, power, precision, rows, tl
from .._launch import cdiv, launch, workspace
from ..kmeans.nearest_kernels import TILE, WHOLE, carrying, crowded, spread
from ..members.kernels import by_label

LEAST_BITS = 18
WIDEST = 8192  # numbers in a tile of rows
COUNTED = 128  # chunks up to which their hashes are sorted by counting, with those of a stretch of tokens in registers
PROGRAMS = 256  # that share a head at most


@jit
def _rows_of(X, lead, heads, at, dims, n, d, sxb, sxh, sxn):
    """A tile of rows of one head, in their own dtype."""
    return tl.load(
        X + (lead // heads) * sxb + (lead % heads) * sxh + at.to(tl.int64)[:, None] * sxn + dims[None, :],
        mask=(at < n)[:, None] & (dims < d)[None, :], other=0.0,
    )  # fmt: skip


@jit
def _project(
    X, DRAWN, VALID, SCORES, NORMS, MOST, lead, n, d, width, heads, sxb, sxh, sxn,
    LIFTED: tl.constexpr, HAS_VALID: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    mine, programs, dims = tl.program_id(0), tl.num_programs(0), tl.arange(0, BD)
    most = tl.zeros((BN,), tl.float32)
    for first in range(mine * BN, n, programs * BN):
        at = first + tl.arange(0, BN)
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
            most = tl.maximum(most, norm)
    if LIFTED:
        tl.store(MOST + lead * programs + mine, tl.max(most, 0))


@jit
def project_kernel(
    Q, K, DRAWN, VALID_Q, VALID_K, SCORES_Q, SCORES_K, NORMS_Q, NORMS_K, MOST_Q, MOST_K,
    n, m, d, width, heads, key_heads, sqb, sqh, sqn, skb, skh, skm,
    LIFTED: tl.constexpr, HAS_Q: tl.constexpr, HAS_K: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """All r projections of queries and keys, and with LIFTED their squared norms and the largest that each program of a
    head has seen: MOST (lead programs)."""
    in_turn()
    lead = tl.program_id(1).to(tl.int64)
    if tl.program_id(2) == 0:
        _project(
            Q, DRAWN, VALID_Q, SCORES_Q, NORMS_Q, MOST_Q, lead, n, d, width, heads, sqb, sqh, sqn,
            LIFTED, HAS_Q, R, BN, BD,
        )  # fmt: skip
    elif lead < tl.num_programs(1) // heads * key_heads:
        _project(
            K, DRAWN, VALID_K, SCORES_K, NORMS_K, MOST_K, lead, m, d, width, key_heads, skb, skh, skm,
            LIFTED, HAS_K, R, BN, BD,
        )  # fmt: skip


@jit
def _lift(
    SCORES, NORMS, MINE, OTHERS, DRAWN, OUT, lead, mine, other, n, column, width, programs,
    R: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    at, part = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BP)
    most = tl.max(tl.load(MINE + mine * programs + part, mask=part < programs, other=0.0), 0)
    most += tl.max(tl.load(OTHERS + other * programs + part, mask=part < programs, other=0.0), 0)
    lift = tl.sqrt(tl.maximum(most - tl.load(NORMS + mine * n + at, mask=at < n, other=0.0), 0.0))
    for one in tl.static_range(R):
        score = tl.load(SCORES + (mine * R + one) * n + at, mask=at < n, other=0.0)
        score += tl.load(DRAWN + one * width + column) * lift
        tl.store(OUT + (lead * R + one) * n + at, score, mask=at < n)


@jit
def lift_kernel(
    SCORES_Q, SCORES_K, NORMS_Q, NORMS_K, MOST_Q, MOST_K, DRAWN, OUT_Q, OUT_K, n, m, d, width, heads, group, programs,
    R: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Scores for each query head: those of its own queries and its group's keys, moved along by the lift."""
    in_turn()
    lead = tl.program_id(1).to(tl.int64)
    keys = (lead // heads) * (heads // group) + (lead % heads) // group
    if tl.program_id(2) == 0:
        _lift(SCORES_Q, NORMS_Q, MOST_Q, MOST_K, DRAWN, OUT_Q, lead, lead, keys, n, d + 1, width, programs, R, BN, BP)
    else:
        _lift(SCORES_K, NORMS_K, MOST_K, MOST_Q, DRAWN, OUT_K, lead, keys, lead, m, d, width, programs, R, BN, BP)


@jit
def _longest(product, BN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Of each row's products (BN BR*BC) with the directions of each round, the one of the largest magnitude, packed:
    above, the magnitude but for its last bits; below, BC where it is positive and how many columns are behind its own.

    The largest and the smallest of numbers that carry their columns, three instructions for a product. Columns are told
    apart in two steps: those eight apart lie in one thread, where their numbers are constants. As integers, negative
    numbers are ordered by magnitude, and above all others where they are taken as unsigned.
    """
    bits = tl.reshape(product, (BN, BR, BC // 8, 8)).to(tl.int32, bitcast=True)
    bits = carrying(bits, -2 * BC, (BC - 8 - 8 * tl.arange(0, BC // 8))[None, None, :, None])
    most = tl.max(bits, 2)
    least = tl.max(bits.to(tl.uint32, bitcast=True), 2).to(tl.int32, bitcast=True)
    most = (most & 0x7FFFFFFF) | tl.where(most < 0, 0, BC)
    least = (least & 0x7FFFFFFF) | tl.where(least < 0, 0, BC)
    return tl.max(tl.maximum(most, least) | (7 - tl.arange(0, 8))[None, None, :], 2)


@jit
def _hash(longest, half, BC: tl.constexpr):
    """Which direction it is, after ``half`` of them those that were negative. Columns past the last direction hold it
    again."""
    column = tl.minimum(BC - 1 - (longest & (BC - 1)), half - 1)
    return column + tl.where((longest & BC) == 0, half, 0)


@jit
def _taking_part(BUCKETS, lead, heads, directions, HAS_BUCKETS: tl.constexpr):
    """How many directions there are for the tokens of a sequence."""
    half = directions
    if HAS_BUCKETS:
        half = ((tl.load(BUCKETS + lead // heads) + 1) // 2).to(tl.int32)
    return half


@jit
def polytope_kernel(
    X, DRAWN, BUCKETS, HASHES, n, d, directions, rounds, heads, sxb, sxh, sxn,
    HAS_BUCKETS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The direction with the largest product in absolute value, and its sign; directions block by block."""
    in_turn()
    lead = tl.program_id(1).to(tl.int64)
    at, dims, column = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BC)
    x = _rows_of(X, lead, heads, at, dims, n, d, sxb, sxh, sxn)
    half = _taking_part(BUCKETS, lead, heads, directions, HAS_BUCKETS)
    for one in range(rounds):
        best, place = tl.full((BN,), -1, tl.int32), tl.zeros((BN,), tl.int32)
        for first in range(0, half, BC):
            which = one * directions + tl.minimum(first + column, half - 1)
            drawn = tl.load(DRAWN + which[:, None] * d + dims[None, :], mask=(dims < d)[None, :], other=0.0)
            product = tl.dot(x, tl.trans(drawn), input_precision=PRECISION)
            longest = tl.reshape(_longest(product, BN, 1, BC), (BN,))
            better = (longest | (2 * BC - 1)) > (best | (2 * BC - 1))
            found = _hash(longest, half - first, BC) + tl.where((longest & BC) == 0, first, 0) + first
            place, best = tl.where(better | (first == 0), found, place), tl.maximum(best, longest)
        tl.store(HASHES + (lead * rounds + one) * n + at, place, mask=at < n)


@jit
def polytope_whole_kernel(
    X, DRAWN, BUCKETS, HASHES, n, d, directions, rounds, heads, stretch, sxb, sxh, sxn,
    HAS_BUCKETS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The same with all directions of BR rounds at once, which stay in shared memory while a stretch of rows passes."""
    in_turn()
    lead, groups = tl.program_id(1).to(tl.int64), tl.cdiv(rounds, BR)
    first, low = tl.program_id(0) % groups * BR, tl.program_id(0) // groups * stretch
    half = _taking_part(BUCKETS, lead, heads, directions, HAS_BUCKETS)
    dims, column, one = tl.arange(0, BD), tl.arange(0, BR * BC), first + tl.arange(0, BR)
    which = tl.minimum(first + column // BC, rounds - 1) * directions + tl.minimum(column % BC, half - 1)
    drawn = tl.load(DRAWN + which[:, None] * d + dims[None, :], mask=(dims < d)[None, :], other=0.0)
    for start in tl.range(low, min(n, low + stretch), BN, num_stages=STAGES):
        at = start + tl.arange(0, BN)
        x = _rows_of(X, lead, heads, at, dims, n, d, sxb, sxh, sxn)
        place = _hash(_longest(tl.dot(x, tl.trans(drawn)), BN, BR, BC), half, BC)
        to = (lead * rounds + one)[None, :] * n + at[:, None]
        tl.store(HASHES + to, place, mask=(at < n)[:, None] & (one < rounds)[None, :])


@jit
def _pack(
    BY, VALID, OUT, row, first, segment, n, rows_each, step,
    BITS: tl.constexpr, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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
def pack_kernel(
    BY, OTHER, VALID, OTHER_VALID, OUT, n, m, rows_each, step,
    BITS: tl.constexpr, HAS_VALID: tl.constexpr, HAS_OTHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sort key of each number: its segment, then the number itself (BITS of a float, or an integer below step - 1);
    the padded ones last. The rows of OTHER follow those of BY."""
    in_turn()
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    if tl.program_id(2) == 0:
        _pack(BY, VALID, OUT, row, 0, 0, n, rows_each, step, BITS, HAS_VALID, BLOCK)
    else:
        _pack(OTHER, OTHER_VALID, OUT, row, rows * n, rows, m, rows_each, step, BITS, HAS_OTHER, BLOCK)


@jit
def _seat(
    INDEX, REAL, OTHER_REAL, TABLE, row, first, n, m, g, size, other_size, width, rows_each, shared,
    HAS_REAL: tl.constexpr, HAS_OTHER: tl.constexpr, BALANCED: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at, batch = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), row // rows_each
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
    token = tl.load(INDEX + base + tl.where(taken, rank, 0)).to(tl.int64)
    if FLAT:
        token -= base
    tl.store(TABLE + row * g * width + at, tl.where(taken, token, -1), mask=at < g * width)


@jit
def seat_kernel(
    INDEX, REAL_Q, REAL_K, QUERIES, KEYS, n, m, g, q_size, k_size, q_width, k_width, rows_each,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, BALANCED: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tables (row g width) of the tokens in the order INDEX (row n), which FLAT counts over all rows. BALANCED: as
    many buckets as the side that needs more, filled evenly, the rows of keys (row m) after those of queries; otherwise
    both are the same rows in chunks of ``size``, each with those before it as far as ``width`` reaches."""
    in_turn()
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    first = rows * n
    if not BALANCED:
        first = rows * 0
    if tl.program_id(2) == 0:
        _seat(
            INDEX, REAL_Q, REAL_K, QUERIES, row, rows * 0, n, m, g, q_size, k_size, q_width, rows_each, 0,
            HAS_Q, HAS_K, BALANCED, FLAT, BLOCK,
        )  # fmt: skip
    else:
        _seat(
            INDEX, REAL_K, REAL_Q, KEYS, row, first, m, n, g, k_size, q_size, k_width, rows_each, 1,
            HAS_K, HAS_Q, BALANCED, FLAT, BLOCK,
        )  # fmt: skip


@jit
def unit_kernel(X, DY, OUT, n, d, heads, sxb, sxh, sxn, BACKWARD: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    """Rows of length 1; BACKWARD: the gradient of x from that of the unit rows."""
    in_turn()
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
    q, k, drawn = rows(q), rows(k), drawn.float().contiguous()
    (b, h, n, d), (hk, m), (r, width) = q.shape, k.shape[1:3], drawn.shape
    tile, longest = WIDEST // power(d), max(n, m)
    programs = min(cdiv(longest, tile), PROGRAMS)
    score_q, score_k = (torch.empty(*x.shape[:2], r, x.shape[2], dtype=torch.float32, device=q.device) for x in (q, k))
    norm_q, norm_k, most_q, most_k = workspace(
        q.device, *(((b, heads, length if lifted else 0), torch.float32) for heads, length in ((h, n), (hk, m))),
        *(((b, heads, programs), torch.float32) for heads in (h, hk)),
    )  # fmt: skip
    found = score_q, score_k, norm_q, norm_k, most_q, most_k
    launch(
        project_kernel, (programs, b * h, 2), (q, k, drawn, _flags(valid_q, q), _flags(valid_k, k), *found),
        (n, m, d, width, h, hk, *q.stride()[:3], *k.stride()[:3]),
        LIFTED=lifted, HAS_Q=valid_q is not None, HAS_K=valid_k is not None, R=r, BN=tile, BD=power(d), num_warps=4,
    )  # fmt: skip
    if not lifted:
        return score_q, score_k if h == hk else score_k.repeat_interleave(h // hk, 1)
    lifts = [torch.empty(b, h, r, length, dtype=torch.float32, device=q.device) for length in (n, m)]
    launch(
        lift_kernel, (cdiv(longest, 1024), b * h, 2), (*found, drawn, *lifts), (n, m, d, width, h, h // hk, programs),
        R=r, BN=1024, BP=power(programs), num_warps=4,
    )  # fmt: skip
    return lifts[0], lifts[1]


def polytope(x: Tensor, drawn: Tensor, buckets: Tensor | None) -> Tensor:
    x, drawn = rows(x), drawn.to(x.dtype).contiguous()
    (b, h, n, d), (rounds, each) = x.shape, drawn.shape[:2]
    hashes = torch.empty(b, h, rounds, n, dtype=torch.int32, device=x.device)
    half, columns, strides = x.dtype != torch.float32, power(each), x.stride()[:3]
    tensors = (x, drawn, x if buckets is None else buckets.reshape(-1).contiguous(), hashes)
    if half and d <= 128 and columns <= WHOLE:
        together = min(power(rounds, least=1), WHOLE // columns)
        groups = cdiv(rounds, together)
        fit = 2 + (together * columns <= 128) + (d <= 64)  # programs on a multiprocessor
        programs, stretch = spread(n, b * h * groups, x, fit)
        launch(
            polytope_whole_kernel, (programs * groups, b * h), tensors, (n, d, each, rounds, h, stretch, *strides),
            HAS_BUCKETS=buckets is not None, BN=TILE, BD=power(d), BR=together, BC=columns, STAGES=3, num_warps=4,
            **crowded(x, fit),
        )  # fmt: skip
        return hashes
    tile, warps = (128, 8) if half and d <= 128 else (64, 4)
    if not half and d > 128:  # a product of three takes twice the shared memory
        tile = 32
    launch(
        polytope_kernel, (cdiv(n, tile), b * h), tensors, (n, d, each, rounds, h, *strides),
        HAS_BUCKETS=buckets is not None, BN=tile, BD=power(d), BC=min(tile, columns), PRECISION=precision(x),
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    return hashes


def _order(numbers: list[Tensor], valid: list[Tensor | None], limit: int) -> Tensor:
    """The stable order of each row (b h r n) of one or two tensors of numbers, the padded ones last, by one flat sort.

    -> positions in the flat sequence of all rows. ``limit``: integers are below it; 0: the numbers are floats.
    """
    (b, h, r, n), m, many = numbers[0].shape, numbers[-1].shape[3], len(numbers)
    total, segments = sum(x.numel() for x in numbers), many * b * h * r
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
    by, other = numbers[0].contiguous(), numbers[-1].contiguous()
    launch(
        pack_kernel, (b * h * r, cdiv(max(n, m), 1024), many),
        (by, other, _flags(valid[0], by), _flags(valid[-1], by), keys), (n, m, h * r, step),
        BITS=bits, HAS_VALID=valid[0] is not None, HAS_OTHER=valid[-1] is not None, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return keys.sort(stable=True).indices


def _counts(valid: Tensor | None) -> Tensor | None:
    return None if valid is None else valid.sum(-1)


def _seats(
    order: Tensor, by: Tensor, m: int, real_q: Tensor | None, real_k: Tensor | None, g: int,
    sizes: tuple[int, int], widths: tuple[int, int], balanced: bool, flat: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    b, h, r, n = by.shape
    queries, keys = (torch.empty(b, h, r * g, width, dtype=torch.int64, device=by.device) for width in widths)
    launch(
        seat_kernel, (b * h * r, cdiv(g * max(widths), 1024), 2),
        (order, order if real_q is None else real_q, order if real_k is None else real_k, queries, keys),
        (n, m, g, *sizes, *widths, h * r),
        HAS_Q=real_q is not None, HAS_K=real_k is not None, BALANCED=balanced, FLAT=flat, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return queries, keys


def balanced(
    score_q: Tensor, score_k: Tensor, valid_q: Tensor | None, valid_k: Tensor | None, q_seats: int, k_seats: int
) -> tuple[Tensor, Tensor]:
    n, m = score_q.shape[3], score_k.shape[3]
    g = max(-(-n // q_seats), -(-m // k_seats), 1)
    order = _order([score_q, score_k], [valid_q, valid_k], 0 if score_q.is_floating_point() else g + 2)
    seats, widths = (q_seats, k_seats), (min(q_seats, n), min(k_seats, m))
    return _seats(order, score_q, m, _counts(valid_q), _counts(valid_k), g, seats, widths, True)


def chunked(hashes: Tensor, valid: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    n, real = hashes.shape[3], _counts(valid)
    g = max(-(-n // chunk), 1)
    counted = g <= COUNTED
    if counted:
        labels = hashes if valid is None else torch.where(valid[:, None, None], hashes, -1)
        order, _ = by_label(labels.flatten(0, 2), g + 2)
    else:
        order = _order([hashes], [valid], g + 2)
    return _seats(order, hashes, n, real, real, g, (chunk, chunk), (chunk, 2 * chunk), False, flat=not counted)


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
