"""Attention inside buckets: a tile of gathered queries walks over its bucket's gathered keys, flash style.

Where a query has seats in several rounds, each round writes its answers at the queries' own positions and a second
kernel joins them in the order of the rounds; where it has any number of seats, every seat writes its own answer and the
list of a query's seats says what to join. Gradients are added up in the same two ways: no atomics.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._jit import THIN, in_turn, jit, power, precision, rows, tl
from .._launch import cdiv, launch
from .lists import gather_sum, join_lists, nothing, seat_lists

if TYPE_CHECKING:
    from .reference import Seating

__all__ = ["forward", "gather_sum"]

LOG2E = 1.4426950408889634
TURNS = 16  # buckets that one program walks past
ONCE, BY_POSITION, BY_SEAT = 0, 1, 2  # where a seat's answer goes: straight out, to its round's copy, to a seat's row


@jit
def _gathered(X, at, columns, width, row_stride):
    """Rows of a head by position, 0 for nobody's (-1)."""
    return tl.load(
        X + at.to(tl.int64)[:, None] * row_stride + columns[None, :],
        mask=(at >= 0)[:, None] & (columns < width)[None, :], other=0.0,
    )  # fmt: skip


@jit
def _unseen(logits, query, key, offset, left, right, WINDOW: tl.constexpr, OTHERS: tl.constexpr):
    """-inf where the query at this position may not see the key at that one. Empty key seats (-1) are seen by nobody;
    what an empty query seat sees is never read."""
    logits += tl.where(key >= 0, 0.0, float("-inf"))[None, :]
    if WINDOW or OTHERS:
        ahead = key.to(tl.int32)[None, :] - (query.to(tl.int32) + offset)[:, None]
        if WINDOW:
            seen = ((right < 0) | (ahead <= right)) & ((left < 0) | (ahead >= -left))
            logits = tl.where(seen, logits, float("-inf"))
        if OTHERS:
            logits = tl.where(ahead != 0, logits, float("-inf"))
    return logits


@jit
def _meetings(LOW, HIGH, RANK, lead, query, key, n, m, rounds):
    """log2 of the number of rounds in which each pair meets."""
    met = tl.zeros((query.shape[0], key.shape[0]), tl.int32)
    for one in range(rounds):
        low = tl.load(LOW + (lead * rounds + one) * n + query, mask=query >= 0, other=0)
        high = tl.load(HIGH + (lead * rounds + one) * n + query, mask=query >= 0, other=0)
        rank = tl.load(RANK + (lead * rounds + one) * m + key, mask=key >= 0, other=-1)
        met += ((rank[None, :] >= low[:, None]) & (rank[None, :] < high[:, None])).to(tl.int32)
    return tl.log2(tl.maximum(met, 1).to(tl.float32))


@jit
def _logits(
    q, k, query, key, BIAS, LOW, HIGH, RANK, lead, n, m, meetings, scale, offset, left, right,
    HAS_BIAS: tl.constexpr, HAS_MEETINGS: tl.constexpr, WINDOW: tl.constexpr, OTHERS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The logits of a tile in base 2, -inf where unseen."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_BIAS:
        logits += tl.load(BIAS + lead * m + key, mask=key >= 0, other=0.0)[None, :] * 1.4426950408889634
    if HAS_MEETINGS:
        logits -= _meetings(LOW, HIGH, RANK, lead, query, key, n, m, meetings)
    return _unseen(logits, query, key, offset, left, right, WINDOW, OTHERS)


@jit
def _home(lead, bucket, row, query, n, g, rounds, WHERE: tl.constexpr):
    """The row to which a seat's answer goes (see ONCE, BY_POSITION, BY_SEAT)."""
    home = row
    if WHERE == 0:
        home = lead * n + query
    if WHERE == 1:
        home = (lead * rounds + bucket // (g // rounds)) * n + query
    return home


@jit
def bucketed_fwd_kernel(
    Q, K, V, BIAS, QUERIES, KEYS, LOW, HIGH, RANK, OUT, LSE,
    n, m, d, e, g, s, z, rounds, meetings, heads, group, scale, offset, left, right,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm,
    HAS_BIAS: tl.constexpr, HAS_MEETINGS: tl.constexpr, WINDOW: tl.constexpr, OTHERS: tl.constexpr,
    WHERE: tl.constexpr, BS: tl.constexpr, BZ: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    ONE_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    in_turn()
    tiles, lead = tl.cdiv(s, BS), tl.program_id(1).to(tl.int64)
    bucket, batch, head = tl.program_id(0) // tiles, lead // heads, lead % heads
    seat, dims, values = (tl.program_id(0) % tiles) * BS + tl.arange(0, BS), tl.arange(0, BD), tl.arange(0, BE)
    row = (lead * g + bucket) * s + seat
    query = tl.load(QUERIES + row, mask=seat < s, other=-1)
    theirs = KEYS + (lead * g + bucket) * z
    K += batch * skb + (head // group) * skh
    V += batch * svb + (head // group) * svh
    q = _gathered(Q + batch * sqb + head * sqh, query, dims, d, sqn)
    highest, total = tl.full((BS,), float("-inf"), tl.float32), tl.zeros((BS,), tl.float32)
    out = tl.zeros((BS, BE), tl.float32)
    stop = z
    if ONE_TILE:
        stop = BZ  # a loop that the compiler sees through
    for first in range(0, stop, BZ):
        place = first + tl.arange(0, BZ)
        key = tl.load(theirs + place, mask=place < z, other=-1)
        k, v = _gathered(K, key, dims, d, skm), _gathered(V, key, values, e, svm)
        logits = _logits(
            q, k, query, key, BIAS, LOW, HIGH, RANK, lead, n, m, meetings, scale, offset, left, right,
            HAS_BIAS, HAS_MEETINGS, WINDOW, OTHERS, PRECISION,
        )  # fmt: skip
        new = tl.maximum(highest, tl.max(logits, 1))
        level = tl.where(new == float("-inf"), 0.0, new)
        p, fade = tl.exp2(logits - level[:, None]), tl.exp2(highest - level)
        out = tl.dot(p.to(v.dtype), v, out * fade[:, None], input_precision=PRECISION)
        highest, total = new, total * fade + tl.sum(p, 1)
    safe = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, (tl.log2(safe) + highest) * 0.6931471805599453, float("-inf"))
    to = _home(lead, bucket, row, query, n, g, rounds, WHERE)
    there = query >= 0
    if WHERE == 2:
        there = seat < s
    tl.store(
        OUT + to[:, None] * e + values[None, :],
        (out * (1.0 / safe)[:, None]).to(OUT.dtype.element_ty),
        mask=there[:, None] & (values < e)[None, :],
    )
    tl.store(LSE + to, lse, mask=there)


@jit
def _looks_back(KEYS, bucket, first, last, s, TURNS: tl.constexpr, BS: tl.constexpr):
    """Are the second halves of the keys of buckets first + 1 .. last - 1 the first halves of the buckets before them?
    ``bucket``: the first of their round."""
    which, seat = first + 1 + tl.arange(0, TURNS), tl.arange(0, BS)
    there = (which < last)[:, None] & (seat < s)[None, :]
    place = KEYS + ((bucket + which) * 2 * s)[:, None] + seat[None, :]
    mine, theirs = tl.load(place + s, mask=there, other=-1), tl.load(place - 2 * s, mask=there, other=-1)
    return tl.max(tl.max((mine != theirs).to(tl.int32), 1), 0) == 0


@jit
def walk_fwd_kernel(
    Q, K, V, QUERIES, KEYS, OUT, LSE,
    n, d, e, g, s, rounds, heads, group, stretches, scale, offset, left, right,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm,
    WINDOW: tl.constexpr, OTHERS: tl.constexpr, TURNS: tl.constexpr,
    BS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Buckets of s queries and 2 s keys, up to TURNS of them one after the other. A step reads half of a bucket's keys,
    which the queries at hand see as their second half, and those of the next bucket as their first: where a bucket's
    second half is what the bucket before has first (chunks that look back), every key is read once; otherwise every
    other step takes up no queries, and twice as many read all."""
    in_turn()
    lead, each = tl.program_id(1).to(tl.int64), g // rounds
    one, first = tl.program_id(0) // stretches, tl.program_id(0) % stretches * TURNS
    last, bucket, batch, head = tl.minimum(first + TURNS, each), lead * g + one * each, lead // heads, lead % heads
    seat, dims, values = tl.arange(0, BS), tl.arange(0, BD), tl.arange(0, BE)
    Q += batch * sqb + head * sqh
    K += batch * skb + (head // group) * skh
    V += batch * svb + (head // group) * svh
    OUT += (lead * rounds + one) * n * e
    LSE += (lead * rounds + one) * n
    back = _looks_back(KEYS, bucket, first, last, s, TURNS, BS)
    query, q = tl.full((BS,), -1, tl.int32), tl.zeros((BS, BD), Q.dtype.element_ty)
    highest, total, out = tl.zeros((BS,), tl.float32), tl.zeros((BS,), tl.float32), tl.zeros((BS, BE), tl.float32)
    for step in tl.range(0, tl.where(back, last - first + 1, 2 * (last - first)), num_stages=STAGES):
        now = first + tl.where(back, tl.maximum(step - 1, 0), step // 2)
        own = tl.where(back, step > 0, step % 2 == 1)
        then = tl.where(back, first + step, tl.where(own, last, now))
        key = tl.load(KEYS + (bucket + now) * 2 * s + tl.where(own, 0, s) + seat, mask=seat < s, other=-1).to(tl.int32)
        k, v = _gathered(K, key, dims, d, skm), _gathered(V, key, values, e, svm)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        logits = _unseen(logits, query, key, offset, left, right, WINDOW, OTHERS)
        new = tl.maximum(highest, tl.max(logits, 1))
        level = tl.where(new == float("-inf"), 0.0, new)
        p, fade = tl.exp2(logits - level[:, None]), tl.exp2(highest - level)
        total = total * fade + tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, out * fade[:, None], input_precision=PRECISION)
        safe, there = tl.where(total > 0, total, 1.0), query >= 0
        lse = tl.where(total > 0, (tl.log2(safe) + new) * 0.6931471805599453, float("-inf"))
        tl.store(
            OUT + query.to(tl.int64)[:, None] * e + values[None, :],
            (out * (1.0 / safe)[:, None]).to(OUT.dtype.element_ty),
            mask=there[:, None] & (values < e)[None, :],
        )
        tl.store(LSE + query, lse, mask=there)
        query = tl.load(QUERIES + (bucket + then) * s + seat, mask=(seat < s) & (then < last), other=-1).to(tl.int32)
        q = _gathered(Q, query, dims, d, sqn)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        logits = _unseen(logits, query, key, offset, left, right, WINDOW, OTHERS)
        highest = tl.max(logits, 1)
        p = tl.exp2(logits - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
        out, total = tl.dot(p.to(v.dtype), v, input_precision=PRECISION), tl.sum(p, 1)


@jit
def join_kernel(
    PART, PART_LSE, Q, K, V, KEPT, OUT, LSE, ALONE, n, m, d, e, heads, group, scale, offset, less,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm,
    OR_SELF: tl.constexpr, HAS_MASK: tl.constexpr,
    ROUNDS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The answers of the rounds into one, in their order. OR_SELF: who saw nobody looks at the key beside itself."""
    in_turn()
    lead, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN)
    dims, values, here = tl.arange(0, BD), tl.arange(0, BE), at < n
    highest = tl.full((BN,), float("-inf"), tl.float32)
    for one in tl.static_range(ROUNDS):
        mine = tl.load(PART_LSE + (lead * ROUNDS + one) * n + at, mask=here, other=float("-inf"))
        highest = tl.maximum(highest, mine)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    total, out = tl.zeros((BN,), tl.float32), tl.zeros((BN, BE), tl.float32)
    for one in tl.static_range(ROUNDS):
        place = (lead * ROUNDS + one) * n + at
        weight = tl.exp(tl.load(PART_LSE + place, mask=here, other=float("-inf")) - level)
        # asked for before the weight is known: who had no seat in this round left anything there
        part = tl.load(PART + place[:, None] * e + values[None, :], mask=here[:, None] & (values < e)[None, :], other=0)
        part = tl.where((weight > 0)[:, None], part.to(tl.float32), 0.0)
        if one == 0:  # begin with the first: sums that begin with 0 trip Triton 3.6 where there is one round
            total, out = weight, weight[:, None] * part
        else:
            total, out = total + weight, out + weight[:, None] * part
    safe = tl.where(total > 0, total, 1.0)
    out = out * (1.0 / safe)[:, None]
    lse = tl.where(total > 0, tl.log(safe) + (level - less), float("-inf"))
    to = lead * n + at
    if OR_SELF:
        batch, head = lead // heads, lead % heads
        beside = (at + offset).to(tl.int64)
        alone = here & (total == 0) & (beside >= 0)
        if HAS_MASK:
            alone = alone & (tl.load(KEPT + batch * m + beside, mask=alone, other=0) != 0)
        if tl.max(alone.to(tl.int32), 0) > 0:  # few tiles have one
            query, key = tl.where(alone, at, -1), tl.where(alone, beside, -1)
            q = _gathered(Q + batch * sqb + head * sqh, query, dims, d, sqn).to(tl.float32)
            k = _gathered(K + batch * skb + (head // group) * skh, key, dims, d, skm).to(tl.float32)
            v = _gathered(V + batch * svb + (head // group) * svh, key, values, e, svm).to(tl.float32)
            out, lse = tl.where(alone[:, None], v, out), tl.where(alone, tl.sum(q * k, 1) * scale, lse)
        tl.store(ALONE + to, alone.to(tl.int8), mask=here)
    tl.store(
        OUT + to[:, None] * e + values[None, :],
        out.to(OUT.dtype.element_ty),
        mask=here[:, None] & (values < e)[None, :],
    )
    tl.store(LSE + to, lse, mask=here)


def arguments(
    q: Tensor, k: Tensor, v: Tensor, seating: Seating
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """What all kernels of a call are given: tensors, sizes, strides and tiles."""
    (h, n, d), (hk, m, e) = q.shape[1:], v.shape[1:]
    (g, s), z = seating.queries.shape[2:], seating.keys.shape[3]
    bias, low, high, rank = (x if x is not None else q for x in (seating.bias, seating.low, seating.high, seating.rank))
    tensors = (q, k, v, bias, seating.queries, seating.keys, low, high, rank)
    meetings = seating.low.shape[2] if seating.low is not None else 1
    sizes = (n, m, d, e, g, s, z, max(seating.rounds, 1), meetings, h, h // hk)
    width, fp32 = power(d) + power(e), q.dtype == torch.float32
    most = 64 if width <= 256 and not fp32 else 32
    keys = 128 if width <= 128 and not fp32 and z == 128 else most  # all of a bucket's keys at once, where they fit
    tiles: dict[str, Any] = {
        "BS": min(most, power(s)), "BZ": min(keys, power(z)), "BD": power(d), "BE": power(e), "ONE_TILE": z <= keys,
        "HAS_BIAS": seating.bias is not None, "HAS_MEETINGS": seating.low is not None, "OTHERS": seating.others,
        "WINDOW": seating.left >= 0 or seating.right >= 0,
        "PRECISION": precision(q), "num_warps": 4 if width <= 128 and not fp32 else 8,
        "num_stages": 1 if z <= 128 else 3,  # a short walk has nothing to run ahead of
    }  # fmt: skip
    return tensors, sizes, (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]), tiles


def plain(seating: Seating) -> Seating:
    """Tables as the kernels read them: contiguous."""
    tables = {name: getattr(seating, name) for name in ("queries", "keys", "bias", "low", "high", "rank")}
    return replace(seating, **{name: x.contiguous() for name, x in tables.items() if x is not None})


def written(rounds: int, or_self: bool) -> int:
    """Where the answers of seats go."""
    return BY_SEAT if rounds < 1 else ONCE if rounds == 1 and not or_self else BY_POSITION


def walks(q: Tensor, v: Tensor, seating: Seating) -> bool:
    """Chunks that see the one before (copies) are walked past, where registers hold the tiles."""
    s, z = seating.queries.shape[3], seating.keys.shape[3]
    fits = q.element_size() == 2 and THIN <= power(s) <= 64 and power(q.shape[3]) + power(v.shape[3]) <= 256
    return fits and seating.copies == 2 and z == 2 * s and seating.bias is None and seating.low is None


def forward(
    q: Tensor, k: Tensor, v: Tensor, seating: Seating, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """out (b h n e), lse (b h n) ``less`` than it is, and with or_self who looked at itself (b h n)."""
    q, k, v, seating = rows(q), rows(k), rows(v), plain(seating)
    rounds, or_self = seating.rounds, seating.or_self
    (b, h, n, d), e, lead = q.shape, v.shape[3], q.shape[0] * q.shape[1]
    tensors, sizes, strides, tiles = arguments(q, k, v, seating)
    (g, s), where = seating.queries.shape[2:], written(rounds, or_self)
    answer = torch.empty(b, h, n, e, dtype=v.dtype, device=q.device)
    weight = torch.empty(b, h, n, dtype=torch.float32, device=q.device)
    if where == ONCE:  # who has no seat answers 0
        answer, weight = answer.zero_(), weight.fill_(float("-inf"))
    part, part_lse = answer, weight
    if where != ONCE:
        seats = lead * (g * s if where == BY_SEAT else rounds * n)
        part = torch.empty(seats, e, dtype=v.dtype, device=q.device)
        part_lse = torch.empty(seats, dtype=torch.float32, device=q.device)
        nothing(part_lse)
    more = (seating.scale * LOG2E, seating.offset, seating.left, seating.right, *strides)
    if where == BY_POSITION and walks(q, v, seating):
        stretches = cdiv(g // rounds, TURNS)
        launch(
            walk_fwd_kernel, (rounds * stretches, lead), (q, k, v, seating.queries, seating.keys, part, part_lse),
            (n, d, e, g, s, rounds, h, h // k.shape[1], stretches, *more),
            **{name: tiles[name] for name in ("WINDOW", "OTHERS", "BS", "BD", "BE", "PRECISION")},
            TURNS=TURNS, STAGES=3, num_warps=4,
        )  # fmt: skip
    else:
        if q.element_size() == 2:  # backward wants eight, which do some of forward's work twice
            tiles["num_warps"] = 4
        launch(
            bucketed_fwd_kernel, (g * cdiv(s, tiles["BS"]), lead), (*tensors, part, part_lse), (*sizes, *more),
            WHERE=where, **tiles,
        )  # fmt: skip
    alone = torch.empty(b, h, n if or_self else 0, dtype=torch.int8, device=q.device)
    if where == BY_SEAT:
        join_lists(seat_lists(seating.queries, n), part, part_lse, answer, weight)
    elif where == BY_POSITION:
        tile = max(16, 2048 // tiles["BE"])
        kept = q if key_mask is None else key_mask.contiguous().view(torch.int8)
        launch(
            join_kernel, (cdiv(n, tile), lead), (part, part_lse, q, k, v, kept, answer, weight, alone),
            (n, v.shape[2], d, e, h, h // v.shape[1], seating.scale, seating.offset, seating.less, *strides),
            OR_SELF=or_self, HAS_MASK=key_mask is not None, ROUNDS=rounds, BN=tile, BD=tiles["BD"], BE=tiles["BE"],
            num_warps=4,
        )  # fmt: skip
    return answer, weight, alone
