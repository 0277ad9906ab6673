"""The backward of attention inside buckets: weights are recomputed from the lse, flash style.

A bucket whose queries fit one tile is served by one program that reads everything once and writes all three gradients.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._jit import in_turn, jit, power, rows, tl
from .._launch import cdiv, launch
from .kernels import BY_POSITION, BY_SEAT, LOG2E, ONCE, _gathered, _home, _logits, arguments, plain, written
from .lists import Alone, seat_lists, seat_places, sum_lists

if TYPE_CHECKING:
    from .reference import Seating


@jit
def delta_kernel(
    OUT, DY, D_LSE, LSE, DELTA, BASE2, SEATED, total, n, e, less,
    HAS_D_LSE: tl.constexpr, ROUNDS: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """rowsum(out * d_out) - d_lse, and the log-weights in base 2 with 0 for rows that saw nothing. Nobody is SEATED in
    any of the ROUNDS yet."""
    in_turn()
    at = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    values = tl.arange(0, BE)
    mask = (at < total)[:, None] & (values < e)[None, :]
    out = tl.load(OUT + at[:, None] * e + values[None, :], mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(DY + at[:, None] * e + values[None, :], mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(out * dy, 1)
    if HAS_D_LSE:
        delta -= tl.load(D_LSE + at, mask=at < total, other=0.0)
    tl.store(DELTA + at, delta, mask=at < total)
    lse = tl.load(LSE + at, mask=at < total, other=0.0)
    tl.store(BASE2 + at, tl.where(lse == float("-inf"), 0.0, (lse + less) * 1.4426950408889634), mask=at < total)
    for one in tl.static_range(ROUNDS):
        seat = ((at // n) * ROUNDS + one) * n + at % n
        tl.store(SEATED + seat, tl.zeros((BN,), tl.int8), mask=at < total)


@jit
def _queries(Q, DY, BASE2, DELTA, query, lead, n, d, e, sqn, dims, values):
    """What a tile of queries brings along: its rows, the gradients of its answers, log-weights and deltas."""
    mine = tl.where(query >= 0, lead * n + query, -1)
    q, dy = _gathered(Q, query, dims, d, sqn), _gathered(DY, mine, values, e, e)
    lse, delta = tl.load(BASE2 + mine, mask=mine >= 0, other=0.0), tl.load(DELTA + mine, mask=mine >= 0, other=0.0)
    return q, dy, lse, delta


@jit
def _gradient_of_logits(
    q, k, v, dy, lse, delta, query, key, BIAS, LOW, HIGH, RANK, lead, n, m, meetings, scale, offset, left, right,
    HAS_BIAS: tl.constexpr, HAS_MEETINGS: tl.constexpr, WINDOW: tl.constexpr, OTHERS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights and gradient of the logits of a tile: (queries keys) twice. An empty query seat has q = dy = delta = 0:
    its weights are finite and its gradients 0."""
    logits = _logits(
        q, k, query, key, BIAS, LOW, HIGH, RANK, lead, n, m, meetings, scale, offset, left, right,
        HAS_BIAS, HAS_MEETINGS, WINDOW, OTHERS, PRECISION,
    )  # fmt: skip
    p = tl.exp2(logits - lse[:, None])
    dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@jit
def _put(X, x, at, columns, width, there):
    """Write whole rows."""
    tl.store(
        X + at[:, None] * width + columns[None, :], x.to(X.dtype.element_ty),
        mask=there[:, None] & (columns < width)[None, :],
    )  # fmt: skip


@jit
def _put_dq(DQ, SEATED, dq, lead, bucket, row, seat, query, n, g, s, d, rounds, dims, WHERE: tl.constexpr):
    to = _home(lead, bucket, row, query, n, g, rounds, WHERE)
    there = query >= 0
    if WHERE == 2:
        there = seat < s
    _put(DQ, dq, to, dims, d, there)
    if WHERE == 1:
        tl.store(SEATED + to, tl.full(to.shape, 1, tl.int8), mask=there)


@jit
def bucketed_bwd_kernel(
    Q, K, V, BIAS, QUERIES, KEYS, LOW, HIGH, RANK, DY, BASE2, DELTA, DQ, SEATED, DK, DV, D_BIAS,
    n, m, d, e, g, s, z, rounds, meetings, heads, group, scale, natural_scale, offset, left, right,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm,
    HAS_BIAS: tl.constexpr, HAS_MEETINGS: tl.constexpr, WINDOW: tl.constexpr, OTHERS: tl.constexpr,
    WHERE: tl.constexpr, BS: tl.constexpr, BZ: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    ONE_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of a bucket whose queries are one tile; those of keys and values seat by seat."""
    in_turn()
    bucket, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = lead // heads, lead % heads
    seat, dims, values = tl.arange(0, BS), tl.arange(0, BD), tl.arange(0, BE)
    row = (lead * g + bucket) * s + seat
    query = tl.load(QUERIES + row, mask=seat < s, other=-1)
    q, dy, lse, delta = _queries(
        Q + batch * sqb + head * sqh, DY, BASE2, DELTA, query, lead, n, d, e, sqn, dims, values
    )
    K += batch * skb + (head // group) * skh
    V += batch * svb + (head // group) * svh
    dq = tl.zeros((BS, BD), tl.float32)
    stop = z
    if ONE_TILE:
        stop = BZ  # a loop that the compiler sees through
    for first in range(0, stop, BZ):
        place = first + tl.arange(0, BZ)
        out = (lead * g + bucket) * z + place
        key = tl.load(KEYS + out, mask=place < z, other=-1)
        k, v = _gathered(K, key, dims, d, skm), _gathered(V, key, values, e, svm)
        p, ds = _gradient_of_logits(
            q, k, v, dy, lse, delta, query, key, BIAS, LOW, HIGH, RANK, lead, n, m, meetings, scale, offset, left,
            right, HAS_BIAS, HAS_MEETINGS, WINDOW, OTHERS, PRECISION,
        )  # fmt: skip
        _put(DV, tl.dot(tl.trans(p.to(dy.dtype)), dy, input_precision=PRECISION), out, values, e, place < z)
        if HAS_BIAS:
            tl.store(D_BIAS + out, tl.sum(ds, 0), mask=place < z)
        ds = (ds * natural_scale).to(q.dtype)
        _put(DK, tl.dot(tl.trans(ds), q, input_precision=PRECISION), out, dims, d, place < z)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    _put_dq(DQ, SEATED, dq, lead, bucket, row, seat, query, n, g, s, d, rounds, dims, WHERE)


@jit
def bucketed_bwd_q_kernel(
    Q, K, V, BIAS, QUERIES, KEYS, LOW, HIGH, RANK, DY, BASE2, DELTA, DQ, SEATED,
    n, m, d, e, g, s, z, rounds, meetings, heads, group, scale, natural_scale, offset, left, right,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm,
    HAS_BIAS: tl.constexpr, HAS_MEETINGS: tl.constexpr, WINDOW: tl.constexpr, OTHERS: tl.constexpr,
    WHERE: tl.constexpr, BS: tl.constexpr, BZ: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    ONE_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries."""
    in_turn()
    tiles, lead = tl.cdiv(s, BS), tl.program_id(1).to(tl.int64)
    bucket, batch, head = tl.program_id(0) // tiles, lead // heads, lead % heads
    seat, dims, values = (tl.program_id(0) % tiles) * BS + tl.arange(0, BS), tl.arange(0, BD), tl.arange(0, BE)
    row = (lead * g + bucket) * s + seat
    query = tl.load(QUERIES + row, mask=seat < s, other=-1)
    q, dy, lse, delta = _queries(
        Q + batch * sqb + head * sqh, DY, BASE2, DELTA, query, lead, n, d, e, sqn, dims, values
    )
    K += batch * skb + (head // group) * skh
    V += batch * svb + (head // group) * svh
    dq = tl.zeros((BS, BD), tl.float32)
    for first in range(0, z, BZ):
        place = first + tl.arange(0, BZ)
        key = tl.load(KEYS + (lead * g + bucket) * z + place, mask=place < z, other=-1)
        k, v = _gathered(K, key, dims, d, skm), _gathered(V, key, values, e, svm)
        p, ds = _gradient_of_logits(
            q, k, v, dy, lse, delta, query, key, BIAS, LOW, HIGH, RANK, lead, n, m, meetings, scale, offset, left,
            right, HAS_BIAS, HAS_MEETINGS, WINDOW, OTHERS, PRECISION,
        )  # fmt: skip
        dq = tl.dot((ds * natural_scale).to(k.dtype), k, dq, input_precision=PRECISION)
    _put_dq(DQ, SEATED, dq, lead, bucket, row, seat, query, n, g, s, d, rounds, dims, WHERE)


@jit
def bucketed_bwd_kv_kernel(
    Q, K, V, BIAS, QUERIES, KEYS, LOW, HIGH, RANK, DY, BASE2, DELTA, DK, DV, D_BIAS,
    n, m, d, e, g, s, z, rounds, meetings, heads, group, scale, natural_scale, offset, left, right,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm,
    HAS_BIAS: tl.constexpr, HAS_MEETINGS: tl.constexpr, WINDOW: tl.constexpr, OTHERS: tl.constexpr,
    BS: tl.constexpr, BZ: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    ONE_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys, written to its own seats."""
    in_turn()
    tiles, lead = tl.cdiv(z, BZ), tl.program_id(1).to(tl.int64)
    bucket, batch, head = tl.program_id(0) // tiles, lead // heads, lead % heads
    place, dims, values = (tl.program_id(0) % tiles) * BZ + tl.arange(0, BZ), tl.arange(0, BD), tl.arange(0, BE)
    out = (lead * g + bucket) * z + place
    key = tl.load(KEYS + out, mask=place < z, other=-1)
    k = _gathered(K + batch * skb + (head // group) * skh, key, dims, d, skm)
    v = _gathered(V + batch * svb + (head // group) * svh, key, values, e, svm)
    dk, dv, d_bias = tl.zeros((BZ, BD), tl.float32), tl.zeros((BZ, BE), tl.float32), tl.zeros((BZ,), tl.float32)
    for first in range(0, s, BS):
        seat = first + tl.arange(0, BS)
        query = tl.load(QUERIES + (lead * g + bucket) * s + seat, mask=seat < s, other=-1)
        q, dy, lse, delta = _queries(
            Q + batch * sqb + head * sqh, DY, BASE2, DELTA, query, lead, n, d, e, sqn, dims, values
        )
        p, ds = _gradient_of_logits(
            q, k, v, dy, lse, delta, query, key, BIAS, LOW, HIGH, RANK, lead, n, m, meetings, scale, offset, left,
            right, HAS_BIAS, HAS_MEETINGS, WINDOW, OTHERS, PRECISION,
        )  # fmt: skip
        dv = tl.dot(tl.trans(p.to(dy.dtype)), dy, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans((ds * natural_scale).to(q.dtype)), q, dk, input_precision=PRECISION)
        if HAS_BIAS:
            d_bias += tl.sum(ds, 0)
    _put(DK, dk, out, dims, d, place < z)
    _put(DV, dv, out, values, e, place < z)
    if HAS_BIAS:
        tl.store(D_BIAS + out, d_bias, mask=place < z)


@jit
def sum_rounds_kernel(
    PART, SEATED, OUT, ALONE, K, D_LSE, n, d, heads, group, offset, scale, sob, soh, skb, skh, skm,
    OR_SELF: tl.constexpr, ROUNDS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dq over the rounds in which a query had a seat; who looked at itself gets the gradient of that one logit."""
    in_turn()
    lead, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN)
    dims, here = tl.arange(0, BD), at < n
    out = tl.zeros((BN, BD), tl.float32)
    for one in tl.static_range(ROUNDS):
        place = (lead * ROUNDS + one) * n + at
        seated = tl.load(SEATED + place, mask=here, other=0) != 0
        out += _gathered(PART, tl.where(seated, place, -1), dims, d, d).to(tl.float32)
    to = lead * n + at
    if OR_SELF:
        alone = tl.load(ALONE + to, mask=here, other=0) != 0
        beside = tl.where(alone, at + offset, -1).to(tl.int64)
        k = _gathered(K + (lead // heads) * skb + ((lead % heads) // group) * skh, beside, dims, d, skm).to(tl.float32)
        out += k * (tl.load(D_LSE + to, mask=alone, other=0.0) * scale)[:, None]
    _put(OUT + (lead // heads) * sob + (lead % heads) * soh, out, at.to(tl.int64), dims, d, here)


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, alone: Tensor,
    seating: Seating,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """alone (b h n): with or_self, who looked at itself for want of others.

    Every seat writes gradients of its own before they are added up: with many rounds a few heads at a time, or these
    would be the largest thing in memory.
    """
    (b, h, n, _), hk = q.shape, k.shape[1]
    (g, s), z = seating.queries.shape[2:], seating.keys.shape[3]
    pieces = max(1, min(b * hk, cdiv(g * (s + 2 * z), 6 * n)))  # six times q at once, the result included
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_bias = torch.empty(b, h, k.shape[2] if seating.bias is not None else 0, dtype=torch.float32, device=q.device)
    names, group = ("queries", "keys", "bias", "low", "high", "rank"), h // hk
    seating, out, lse, alone = plain(seating), out.contiguous(), lse.contiguous(), alone.contiguous()
    d_lse = None if d_lse is None else d_lse.contiguous()
    # Whole sequences, or heads of one: what lies densely still does.
    rows_each, size = max(1, b // pieces), max(1, hk // cdiv(pieces, b))
    for row, head in itertools.product(range(0, b, rows_each), range(0, hk, size)):
        batch = slice(row, row + rows_each)
        theirs = batch, slice(head, head + size)
        mine = batch, slice(head * group, (head + size) * group)
        few: dict[str, Any] = {name: None if (x := getattr(seating, name)) is None else x[mine] for name in names}
        _few_heads(
            d_out[mine], None if d_lse is None else d_lse[mine], q[mine], k[theirs], v[theirs], out[mine], lse[mine],
            alone[mine], replace(seating, **few), (dq[mine], dk[theirs], dv[theirs], d_bias[mine]),
        )  # fmt: skip
    return dq, dk, dv, d_bias


def _join_queries(
    dq: Tensor, part: Tensor, seated: Tensor, k: Tensor, d_lse: Tensor, alone: Tensor, of_lse: bool, seating: Seating
) -> None:
    """dq of what the buckets wrote for queries: by seat, or by position for each round."""
    (b, h, n, d), hk, rounds, or_self = dq.shape, k.shape[1], seating.rounds, seating.or_self
    where = written(rounds, or_self)
    if where == BY_SEAT:
        sum_lists(seat_lists(seating.queries, n), part, dq, h)
    elif where == BY_POSITION:
        tile = max(16, 2048 // power(d))
        launch(
            sum_rounds_kernel, (cdiv(n, tile), b * h), (part, seated, dq, alone, k, d_lse),
            (n, d, h, h // hk, seating.offset, seating.scale, *dq.stride()[:2], *k.stride()[:3]),
            OR_SELF=or_self and of_lse, ROUNDS=rounds, BN=tile, BD=power(d), num_warps=4,
        )  # fmt: skip
    elif part is not dq:
        dq.copy_(part)


def _few_heads(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, alone: Tensor,
    seating: Seating, answer: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """answer: where dq, dk, dv and d_bias are written."""
    q, k, v = rows(q), rows(k), rows(v)
    (b, h, n, d), (m, e) = q.shape, v.shape[2:]
    lead, (g, s), z = b * h, seating.queries.shape[2:], seating.keys.shape[3]
    tensors, sizes, strides, tiles = arguments(q, k, v, seating)
    rounds, or_self, dq = seating.rounds, seating.or_self, answer[0]
    where = written(rounds, or_self)

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=q.device)

    dy = d_out.to(v.dtype).contiguous()
    delta, base2 = torch.empty_like(lse), torch.empty_like(lse)
    each_round = rounds if where == BY_POSITION else 0
    seated = new(lead * each_round * n, dtype=torch.int8)
    launch(
        delta_kernel, (cdiv(lead * n, 64),), (out, dy, lse if d_lse is None else d_lse, lse, delta, base2, seated),
        (lead * n, n, e, seating.less),
        HAS_D_LSE=d_lse is not None, ROUNDS=each_round, BN=64, BE=tiles["BE"], num_warps=4,
    )  # fmt: skip
    # Gradients of queries by position or seat, those of keys by seat: in the inputs' dtype, as the result will be. Four
    # roundings in place of one keep dq within twice the reference's error.
    if where == ONCE:
        part = (dq if dq.is_contiguous() else new(b, h, n, d, dtype=q.dtype)).zero_()
    else:
        part = new(lead * (g * s if where == BY_SEAT else rounds * n), d, dtype=q.dtype)
    dk, dv = new(lead, g * z, d, dtype=k.dtype), new(lead, g * z, e, dtype=v.dtype)
    d_bias = new(lead, g * z if seating.bias is not None else 0, dtype=torch.float32)
    numbers = (*sizes, seating.scale * LOG2E, seating.scale, seating.offset, seating.left, seating.right, *strides)
    fits = tiles["PRECISION"] == "tf32" or tiles["BD"] + tiles["BE"] <= 256  # a product of three takes twice as much
    if s <= tiles["BS"] and fits:
        launch(
            bucketed_bwd_kernel, (g, lead), (*tensors, dy, base2, delta, part, seated, dk, dv, d_bias), numbers,
            WHERE=where, **tiles,
        )  # fmt: skip
    else:
        launch(
            bucketed_bwd_q_kernel, (g * cdiv(s, tiles["BS"]), lead), (*tensors, dy, base2, delta, part, seated),
            numbers, WHERE=where, **tiles,
        )  # fmt: skip
        launch(
            bucketed_bwd_kv_kernel, (g * cdiv(z, tiles["BZ"]), lead), (*tensors, dy, base2, delta, dk, dv, d_bias),
            numbers, **tiles,
        )  # fmt: skip
    of_lse = d_lse is not None
    _join_queries(
        dq, part, seated, k, d_lse if d_lse is not None else lse, alone if or_self else seated, of_lse, seating
    )
    del part
    known = rounds > 0 and seating.copies > 0  # in how many parts a key may have a seat
    lists = seat_places(seating.keys, m, rounds, seating.copies) if known else seat_lists(seating.keys, m)
    of_k = of_v = None
    if or_self:
        of_k = None if d_lse is None else Alone(alone, q, d_lse, seating.offset, seating.scale)
        of_v = Alone(alone, dy, None, seating.offset, 1.0)
    sum_lists(lists, dk, answer[1], h, of_k)
    sum_lists(lists, dv, answer[2], h, of_v)
    if seating.bias is not None:
        sum_lists(lists, d_bias, answer[3].unsqueeze(-1), h)
