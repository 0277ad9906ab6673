"""Each token's seats as a list: what seats hold for a token is added up, or joined, in the order of the table."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._jit import in_turn, jit, power, tl
from .._launch import cdiv, launch


class Lists(NamedTuple):
    order: Tensor  # the flat seats, sorted by token
    start: Tensor  # (lead * (length + 1)): where each token's seats begin; the last of each sequence: the empty ones


class KnownSeats(NamedTuple):
    order: Tensor  # (lead length each): the flat seats of each token, -1 where it has none
    each: int


class Alone(NamedTuple):
    """The tokens that looked at themselves for want of others: their share of a key's gradient."""

    flags: Tensor  # (lead n)
    x: Tensor  # (b h n d): what the key receives ...
    weight: Tensor | None  # (lead n): ... times this
    offset: int  # query i stands beside key i + offset
    scale: float


@jit
def tokens_kernel(TABLE, TOKENS, total, length, seats, BN: tl.constexpr):
    """Which token sits where. A token of sequence i is numbered i (length + 1) + its position; -1, an empty seat, has
    position ``length``."""
    in_turn()
    at = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    place = tl.load(TABLE + at, mask=at < total, other=-1).to(tl.int64)
    token = (at // seats) * (length + 1) + tl.where(place < 0, length, place)
    tl.store(TOKENS + at, token.to(TOKENS.dtype.element_ty), mask=at < total)


@jit
def starts_kernel(TOKENS, START, many, total, steps, BN: tl.constexpr):
    """START[i]: how many of the sorted TOKENS are below i, by halving."""
    in_turn()
    token = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    low, high = tl.zeros((BN,), tl.int64), tl.zeros((BN,), tl.int64) + total
    for _ in range(steps):
        middle = (low + high) // 2
        below = tl.load(TOKENS + tl.minimum(middle, total - 1)).to(tl.int64) < token
        high = tl.where((low < high) & (below == 0), middle, high)
        low = tl.where((low < high) & below, middle + 1, low)
    tl.store(START + token, low, mask=token < many)


def seat_lists(table: Tensor, length: int) -> Lists:
    """table (b h g s) of positions below ``length``; -1 is an empty seat."""
    lead, total = table.shape[0] * table.shape[1], table.numel()
    many = lead * (length + 1)
    token = torch.empty(total, dtype=torch.int32 if many < 2**31 else torch.int64, device=table.device)
    launch(
        tokens_kernel, (cdiv(total, 1024),), (table.contiguous(), token), (total, length, total // lead), BN=1024,
        num_warps=4,
    )  # fmt: skip
    token, order = token.sort(stable=True)
    start = torch.empty(many, dtype=torch.int64, device=table.device)
    launch(
        starts_kernel, (cdiv(many, 256),), (token, start), (many, total, total.bit_length()), BN=256, num_warps=4
    )  # fmt: skip
    return Lists(order, start)


@jit
def fill_kernel(X, total, BLOCK: tl.constexpr):
    """Nothing everywhere: -inf, or position -1."""
    in_turn()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if X.dtype.element_ty.is_int():
        value = tl.full((BLOCK,), -1, X.dtype.element_ty)
    else:
        value = tl.full((BLOCK,), float("-inf"), X.dtype.element_ty)
    tl.store(X + at, value, mask=at < total)


def nothing(x: Tensor) -> None:
    launch(fill_kernel, (cdiv(x.numel(), 4096),), (x,), (x.numel(),), BLOCK=4096, num_warps=4)


@jit
def places_kernel(TABLE, PLACES, total, length, buckets, width, rounds, copies, BN: tl.constexpr):
    """PLACES (lead length rounds copies): the flat seat of each token in each part of the buckets of each round."""
    in_turn()
    at = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    token = tl.load(TABLE + at, mask=at < total, other=-1).to(tl.int64)
    bucket, lead = at // width % buckets, at // width // buckets
    part = bucket // (buckets // rounds) * copies + at % width * copies // width
    place = (lead * length + token) * (rounds * copies) + part
    tl.store(PLACES + place, at.to(PLACES.dtype.element_ty), mask=token >= 0)


def seat_places(table: Tensor, length: int, rounds: int, copies: int) -> KnownSeats:
    """As ``seat_lists``, where a token has no more than one seat in each of so many parts: without a sort."""
    (b, h, buckets, width), total = table.shape, table.numel()
    dtype = torch.int32 if total < 2**31 else torch.int64
    places = torch.empty(b * h * length * rounds * copies, dtype=dtype, device=table.device)
    nothing(places)
    launch(
        places_kernel, (cdiv(total, 1024),), (table.contiguous(), places),
        (total, length, buckets, width, rounds, copies), BN=1024, num_warps=4,
    )  # fmt: skip
    return KnownSeats(places, rounds * copies)


@jit
def gather_sum_kernel(
    ORDER, START, PART, OUT, FLAGS, X, WEIGHT, length, total, each, d, n, offset, heads, group, scale,
    sob, soh, sxb, sxh, sxn,
    LISTED: tl.constexpr, ALONE: tl.constexpr, WEIGHED: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """OUT[i] = the sum of PART[ORDER[j]] for j in START[i]..START[i+1], in that order, head by head of a group; or, not
    LISTED, for j in i each .. (i+1) each where that is a seat."""
    in_turn()
    kv_heads = heads // group
    place = tl.program_id(1).to(tl.int64)
    batch, kv_head = place // kv_heads, place % kv_heads
    at, dims = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)
    here = at < length
    out = tl.zeros((BR, BD), tl.float32)
    for one in range(group):
        head = kv_head * group + one
        lead = batch * heads + head
        if LISTED:
            first = tl.load(START + lead * (length + 1) + at, mask=here, other=0)
            last = tl.load(START + lead * (length + 1) + at + 1, mask=here, other=0)
            most = tl.max((last - first).to(tl.int32), axis=0)
        else:
            first = (lead * length + at) * each
            last, most = tl.where(here, first + each, first), each
        for step in range(most):
            turn = first + step
            seat = tl.load(ORDER + tl.minimum(turn, total - 1))  # in bounds; a masked load trips Triton 3.6
            seat = seat.to(tl.int64)
            mask = ((turn < last) & (seat >= 0))[:, None] & (dims < d)[None, :]
            out += tl.load(PART + seat[:, None] * d + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        if ALONE:
            query = at - offset
            alone = tl.load(FLAGS + lead * n + query, mask=here & (query >= 0) & (query < n), other=0) != 0
            x = tl.load(
                X + batch * sxb + head * sxh + query.to(tl.int64)[:, None] * sxn + dims[None, :],
                mask=alone[:, None] & (dims < d)[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            if WEIGHED:
                x = x * (tl.load(WEIGHT + lead * n + query, mask=alone, other=0.0) * scale)[:, None]
            out += x
    to = OUT + batch * sob + kv_head * soh + at.to(tl.int64)[:, None] * d + dims[None, :]
    tl.store(to, out.to(OUT.dtype.element_ty), mask=here[:, None] & (dims < d)[None, :])


@jit
def join_lists_kernel(ORDER, START, PART, PART_LSE, OUT, LSE, n, total, e, BR: tl.constexpr, BE: tl.constexpr):
    """The answers at a query's seats into one, in the order of its list."""
    in_turn()
    lead, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BR + tl.arange(0, BR)
    values, here = tl.arange(0, BE), at < n
    first = tl.load(START + lead * (n + 1) + at, mask=here, other=0)
    last = tl.load(START + lead * (n + 1) + at + 1, mask=here, other=0)
    highest, weight = tl.full((BR,), float("-inf"), tl.float32), tl.zeros((BR,), tl.float32)
    out = tl.zeros((BR, BE), tl.float32)
    for step in range(tl.max((last - first).to(tl.int32), axis=0)):
        turn = first + step
        seat = tl.load(ORDER + tl.minimum(turn, total - 1))
        lse = tl.where(turn < last, tl.load(PART_LSE + seat), float("-inf"))
        new = tl.maximum(highest, lse)
        level = tl.where(new == float("-inf"), 0.0, new)
        mine, fade = tl.exp(lse - level), tl.exp(highest - level)
        part = tl.load(
            PART + seat[:, None] * e + values[None, :], mask=(mine > 0)[:, None] & (values < e)[None, :], other=0.0
        )
        out = out * fade[:, None] + mine[:, None] * part.to(tl.float32)
        weight, highest = weight * fade + mine, new
    safe = tl.where(weight > 0, weight, 1.0)
    to = lead * n + at
    tl.store(
        OUT + to[:, None] * e + values[None, :],
        (out / safe[:, None]).to(OUT.dtype.element_ty),
        mask=here[:, None] & (values < e)[None, :],
    )
    tl.store(LSE + to, tl.where(weight > 0, tl.log(safe) + highest, float("-inf")), mask=here)


def sum_lists(lists: Lists | KnownSeats, part: Tensor, out: Tensor, heads: int, alone: Alone | None = None) -> Tensor:
    """Add up what stands at each token's seats: part (b*heads g*s d) -> out (b hk length d), whose rows are dense."""
    b, hk, length, d = out.shape
    flags, x, weight, n, offset, scale = part, part, part, 0, 0, 0.0
    strides: tuple[int, ...] = (0, 0, 0)
    if alone is not None:
        flags, x, offset, scale = alone.flags, alone.x, alone.offset, alone.scale
        weight = alone.weight if alone.weight is not None else part
        n, strides = x.shape[2], x.stride()[:3]
    start, each = (lists.start, 0) if isinstance(lists, Lists) else (lists.order, lists.each)
    launch(
        gather_sum_kernel, (cdiv(length, 32), b * hk), (lists.order, start, part, out, flags, x, weight),
        (length, lists.order.numel(), each, d, n, offset, heads, heads // hk, scale, *out.stride()[:2], *strides),
        LISTED=isinstance(lists, Lists), ALONE=alone is not None,
        WEIGHED=alone is not None and alone.weight is not None, BR=32, BD=power(d), num_warps=4,
    )  # fmt: skip
    return out


def gather_sum(table: Tensor, length: int, part: Tensor, hk: int) -> Tensor:
    """Add up what stands at each token's seats: table (b h g s), part (b h ... d) -> (b hk length d)."""
    out = torch.empty(table.shape[0], hk, length, part.shape[-1], dtype=part.dtype, device=part.device)
    return sum_lists(seat_lists(table, length), part, out, table.shape[1])


def join_lists(lists: Lists, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    b, h, n, e = out.shape
    launch(
        join_lists_kernel, (cdiv(n, 32), b * h), (lists.order, lists.start, part, part_lse, out, lse),
        (n, lists.order.numel(), e), BR=32, BE=power(e), num_warps=4,
    )  # fmt: skip
