"""Each token's seats as a list: what seats hold for a token is added up, or joined, in the order of the table."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._jit import jit, power, tl
from .._launch import cdiv, launch


class Lists(NamedTuple):
    order: Tensor  # the flat seats, sorted by token
    start: Tensor  # (lead * (length + 1)): where each token's seats begin; the last of each sequence: the empty ones


class Alone(NamedTuple):
    """The tokens that looked at themselves for want of others: their share of a key's gradient."""

    flags: Tensor  # (lead n)
    x: Tensor  # (b h n d): what the key receives ...
    weight: Tensor | None  # (lead n): ... times this
    offset: int  # query i stands beside key i + offset
    scale: float


def seats_by_token(table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The tokens that sit in a table (b h g s) of positions below ``length``, sorted, and the flat seat of each.

    A token of sequence i is numbered i (length + 1) + its position; -1, an empty seat, has position ``length``.
    """
    lead, size = table.shape[0] * table.shape[1], length + 1
    kind = torch.int32 if lead * size < 2**31 else torch.int64
    sequence = torch.arange(lead, device=table.device).view(*table.shape[:2], 1, 1) * size
    token = (torch.where(table < 0, length, table) + sequence).to(kind).view(-1)
    token, order = token.sort(stable=True)
    return token, order


def seat_lists(table: Tensor, length: int) -> Lists:
    """table (b h g s) of positions below ``length``; -1 is an empty seat."""
    token, order = seats_by_token(table, length)
    many = table.shape[0] * table.shape[1] * (length + 1)
    start = torch.searchsorted(token, torch.arange(many, dtype=token.dtype, device=table.device))
    return Lists(order, start)


@jit
def gather_sum_kernel(
    ORDER, START, PART, OUT, FLAGS, X, WEIGHT, rows, total, d, n, offset, heads, scale, sxb, sxh, sxn,
    ALONE: tl.constexpr, WEIGHED: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """OUT[i] = the sum of PART[ORDER[j]] for j in START[i]..START[i+1], in that order."""
    lead, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BR + tl.arange(0, BR)
    dims, here = tl.arange(0, BD), at < rows
    first = tl.load(START + lead * (rows + 1) + at, mask=here, other=0)
    last = tl.load(START + lead * (rows + 1) + at + 1, mask=here, other=0)
    out = tl.zeros((BR, BD), tl.float32)
    for step in range(tl.max((last - first).to(tl.int32), axis=0)):
        turn = first + step
        more = turn < last
        seat = tl.load(ORDER + tl.minimum(turn, total - 1))  # in bounds; a masked load trips Triton 3.6
        part = tl.load(PART + seat[:, None] * d + dims[None, :], mask=more[:, None] & (dims < d)[None, :], other=0.0)
        out += part.to(tl.float32)
    if ALONE:
        query = at - offset
        alone = tl.load(FLAGS + lead * n + query, mask=here & (query >= 0) & (query < n), other=0) != 0
        x = tl.load(
            X + (lead // heads) * sxb + (lead % heads) * sxh + query.to(tl.int64)[:, None] * sxn + dims[None, :],
            mask=alone[:, None] & (dims < d)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if WEIGHED:
            x = x * (tl.load(WEIGHT + lead * n + query, mask=alone, other=0.0) * scale)[:, None]
        out += x
    tl.store(
        OUT + (lead * rows + at)[:, None] * d + dims[None, :],
        out.to(OUT.dtype.element_ty),
        mask=here[:, None] & (dims < d)[None, :],
    )


@jit
def join_lists_kernel(ORDER, START, PART, PART_LSE, OUT, LSE, n, total, e, BR: tl.constexpr, BE: tl.constexpr):
    """The answers at a query's seats into one, in the order of its list."""
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


def sum_lists(lists: Lists, lead: int, length: int, part: Tensor, d: int, alone: Alone | None = None) -> Tensor:
    """Add up what stands at each token's seats: part (lead g*s d) -> (lead length d)."""
    total = torch.empty(lead, length, d, dtype=part.dtype, device=part.device)
    flags, x, weight, n, offset, scale = part, part, part, 0, 0, 0.0
    heads = 1
    strides: tuple[int, ...] = (0, 0, 0)
    if alone is not None:
        flags, x, offset, scale = alone.flags, alone.x, alone.offset, alone.scale
        weight = alone.weight if alone.weight is not None else part
        heads, n, strides = x.shape[1], x.shape[2], x.stride()[:3]
    launch(
        gather_sum_kernel, (cdiv(length, 32), lead), (lists.order, lists.start, part, total, flags, x, weight),
        (length, lists.order.numel(), d, n, offset, heads, scale, *strides),
        ALONE=alone is not None, WEIGHED=alone is not None and alone.weight is not None,
        BR=32, BD=power(d), num_warps=4,
    )  # fmt: skip
    return total


def gather_sum(table: Tensor, length: int, part: Tensor, d: int) -> Tensor:
    """Add up what stands at each token's seats: table (b h g s), part (lead g*s d) -> (lead length d)."""
    return sum_lists(seat_lists(table, length), table.shape[0] * table.shape[1], length, part, d)


def join_lists(lists: Lists, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    b, h, n, e = out.shape
    launch(
        join_lists_kernel, (cdiv(n, 32), b * h), (lists.order, lists.start, part, part_lse, out, lse),
        (n, lists.order.numel(), e), BR=32, BE=power(e), num_warps=4,
    )  # fmt: skip
