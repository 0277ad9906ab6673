"""Attention inside buckets, as a flash-style pair: forward keeps (out, lse) only, backward recomputes the weights.

A pair (i, j) that shares several buckets counts once for each, or once in all when ``rank`` (b h r m) and the span of
ranks ``low``/``high`` (b h r n) that query i meets in each round are given: its logit then loses log(meetings).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._types import Attended, Mask
from .._chunks import budget, spans, wide
from ..merge import NEVER
from ..rows import flat_index


@dataclass(frozen=True)
class Seating:
    """Everything about a call but q, k and v."""

    queries: Tensor  # (b h g s)
    keys: Tensor  # (b h g z)
    bias: Tensor | None  # (b h m) added to the logits of a key
    low: Tensor | None
    high: Tensor | None
    rank: Tensor | None
    scale: float
    offset: int
    left: int  # how far before itself a query sees; -1: any distance
    right: int  # how far after itself; 0 is causal, -1 any distance
    others: bool  # a query does not see itself
    rounds: int  # see Buckets
    copies: int
    or_self: bool  # a query that met nobody attends to itself: for kernels alone, the reference does so afterwards
    less: float  # taken off the log-weights: likewise

    @classmethod
    def of(
        cls, bias: Tensor | None, queries: Tensor, keys: Tensor, low: Tensor | None, high: Tensor | None,
        rank: Tensor | None, scale: float, less: float, numbers: Sequence[int],
    ) -> Seating:  # fmt: skip
        """From an op's arguments; numbers: offset, left, right, others, rounds, copies, or_self."""
        offset, left, right, others, rounds, copies, or_self = numbers
        return cls(
            queries, keys, bias, low, high, rank, scale, offset, left, right, bool(others), rounds, copies,
            bool(or_self), less,
        )  # fmt: skip


@dataclass(frozen=True)
class SeatedPiece:
    """A few buckets: row numbers into the flattened tensors, gathered rows, and the logits between them."""

    index: slice
    query_rows: Tensor  # (g s) into (b h n)
    key_rows: Tensor  # (g z) into (b hk m)
    bias_rows: Tensor  # (g z) into (b h m)
    x: Tensor  # (g s d)
    y: Tensor  # (g z d)
    logits: Tensor  # (g s z), -inf where unseen


def _split_long(queries: Tensor, keys: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Cut the queries of buckets whose s x z would be too large; their keys are shared by the parts."""
    b, h, g, s = queries.shape
    z = keys.shape[-1]
    size = max(1, most // max(z, 1))
    if s <= size:
        return queries, keys
    parts = -(-s // size)
    queries = torch.nn.functional.pad(queries, (0, parts * size - s), value=-1).view(b, h, g * parts, size)
    return queries, keys.repeat_interleave(parts, dim=2)


def _pieces(q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, seating: Seating) -> Iterator[SeatedPiece]:
    (b, h, n, d), (hk, m) = q.shape, k.shape[1:3]
    s, z = queries.shape[-1], keys.shape[-1]
    q_rows, k_rows = q.reshape(b * h * n, d), k.reshape(b * hk * m, d)
    query_at, key_at = queries.flatten(0, 2), keys.flatten(0, 2)
    flat_queries = flat_index(queries, h, n).flatten(0, 2)
    flat_keys = flat_index(keys, hk, m).flatten(0, 2)
    flat_bias = flat_keys if hk == h else flat_index(keys, h, m).flatten(0, 2)
    bias = None if seating.bias is None else seating.bias.reshape(-1)
    for index in spans(len(query_at), budget(q) // max(s * z, s * d, z * d, 1)):
        mine, theirs = query_at[index], key_at[index]
        x = wide(q_rows.index_select(0, flat_queries[index].reshape(-1))).view(-1, s, d)
        y = wide(k_rows.index_select(0, flat_keys[index].reshape(-1))).view(-1, z, d)
        logits = torch.bmm(x, y.mT).mul_(seating.scale)
        if bias is not None:
            logits += bias.index_select(0, flat_bias[index].reshape(-1)).view(-1, 1, z)
        unseen = (theirs < 0).unsqueeze(1)
        if seating.left >= 0 or seating.right >= 0 or seating.others:
            ahead = theirs.unsqueeze(1) - (mine + seating.offset).unsqueeze(2)
            if seating.right >= 0:
                unseen = unseen | (ahead > seating.right)
            if seating.left >= 0:
                unseen = unseen | (ahead < -seating.left)
            if seating.others:
                unseen = unseen | (ahead == 0)
        if seating.rank is not None and seating.low is not None and seating.high is not None:
            logits -= (
                _meetings(seating.low, seating.high, seating.rank, flat_queries[index], flat_bias[index])
                .to(logits.dtype)
                .log_()
            )
        logits.masked_fill_(unseen, NEVER)
        logits.masked_fill_((mine < 0).unsqueeze(2), NEVER)
        yield SeatedPiece(index, flat_queries[index], flat_keys[index], flat_bias[index], x, y, logits)


def _meetings(low: Tensor, high: Tensor, rank: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """In how many rounds each pair of the piece meets; at least 1, as it met here: (g s z)."""
    b, h, r, n = low.shape
    met = torch.zeros(*queries.shape, keys.shape[-1], dtype=torch.int64, device=low.device)
    for one in range(r):
        lows, highs, ranks = (x[:, :, one].reshape(-1) for x in (low, high, rank))
        theirs = ranks[keys].unsqueeze(1)
        met += (theirs >= lows[queries].unsqueeze(2)) & (theirs < highs[queries].unsqueeze(2))
    return met.clamp_(min=1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, seating: Seating, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """out (b h n e), lse (b h n), and nobody who looked at itself (b h 0)."""
    (b, h, n, _), (hk, m, e) = q.shape, v.shape[1:]
    queries, keys = _split_long(seating.queries, seating.keys, budget(q))
    v_rows = v.reshape(b * hk * m, e)
    seats = queries.flatten(0, 2)
    acc = torch.promote_types(q.dtype, torch.float32)
    answers = torch.zeros(*seats.shape, e, dtype=acc, device=q.device)
    weights = torch.full(seats.shape, NEVER, dtype=acc, device=q.device)
    for piece in _pieces(q, k, queries, keys, seating):
        values = wide(v_rows.index_select(0, piece.key_rows.reshape(-1))).view(*piece.key_rows.shape, e)
        highest = piece.logits.amax(-1, keepdim=True) if piece.logits.shape[-1] else weights[piece.index].unsqueeze(-1)
        p = piece.logits.sub_(torch.where(highest == NEVER, 0.0, highest)).exp_()
        total = p.sum(-1, keepdim=True)
        answers[piece.index] = torch.bmm(p, values).div_(torch.where(total > 0, total, 1.0))
        weights[piece.index] = (total.log_() + highest).squeeze(-1)
    # Seats of one query are joined by their log-weights, in the order of the table: the same bits every time.
    rows = flat_index(queries, h, n).reshape(-1)
    flat = torch.where(seats.reshape(-1) >= 0, weights.reshape(-1), NEVER)
    highest = torch.full((b * h * n,), NEVER, dtype=acc, device=q.device).scatter_reduce_(0, rows, flat, "amax")
    shift = torch.where(highest == NEVER, 0.0, highest)
    share = torch.exp(flat - shift[rows])
    total = torch.zeros(b * h * n, dtype=acc, device=q.device).index_add_(0, rows, share)
    answers = answers.view(-1, e).mul_((share / torch.where(total > 0, total, 1.0)[rows]).unsqueeze(-1))
    out = torch.zeros(b * h * n, e, dtype=acc, device=q.device).index_add_(0, rows, answers)
    nobody = torch.empty(b, h, 0, dtype=torch.int8, device=q.device)
    return out.view(b, h, n, e), (total.log() + shift).view(b, h, n), nobody


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, alone: Tensor,
    seating: Seating,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (b, h, n, d), (hk, m, e) = q.shape, v.shape[1:]
    queries, keys = _split_long(seating.queries, seating.keys, budget(q))
    acc = lse.dtype
    flat_lse = torch.where(lse == NEVER, 0.0, lse).reshape(-1)
    delta = (d_out * out).sum(-1)
    delta = (delta if d_lse is None else delta - d_lse).reshape(-1)
    d_rows, v_rows = d_out.reshape(b * h * n, e), v.reshape(b * hk * m, e)
    dq = torch.zeros(b * h * n, d, dtype=acc, device=q.device)
    dk = torch.zeros(b * hk * m, d, dtype=acc, device=q.device)
    dv = torch.zeros(b * hk * m, e, dtype=acc, device=q.device)
    d_bias = torch.zeros(b * h * m if seating.bias is not None else 0, dtype=acc, device=q.device)
    for piece in _pieces(q, k, queries, keys, seating):
        flat_q, flat_k = piece.query_rows.reshape(-1), piece.key_rows.reshape(-1)
        values = wide(v_rows.index_select(0, flat_k)).view(*piece.key_rows.shape, e)
        dy = d_rows.index_select(0, flat_q).view(*piece.query_rows.shape, e)
        p = piece.logits.sub_(flat_lse[piece.query_rows].unsqueeze(-1)).exp_()
        dv.index_add_(0, flat_k, torch.bmm(p.mT, dy).view(-1, e))
        ds = torch.bmm(dy, values.mT).sub_(delta[piece.query_rows].unsqueeze(-1)).mul_(p)
        if seating.bias is not None:
            d_bias.index_add_(0, piece.bias_rows.reshape(-1), ds.sum(1).view(-1))
        ds.mul_(seating.scale)
        dq.index_add_(0, flat_q, torch.bmm(ds, piece.y).view(-1, d))
        dk.index_add_(0, flat_k, torch.bmm(ds.mT, piece.x).view(-1, d))
    return (
        dq.view(b, h, n, d),
        dk.view(b, hk, m, d),
        dv.view(b, hk, m, e),
        d_bias.view(b, h, m if seating.bias is not None else 0),
    )


def or_self(
    answer: Attended, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, take: Callable[..., Tensor]
) -> Attended:
    """A query that met no key it may see attends to the key at its own position, where that key is real."""
    b, h, n, _ = q.shape
    at = torch.arange(n, device=q.device) + mask.offset
    real = mask.key_rows(q)[:, at.clamp(min=0)] & (at >= 0)  # (b n)
    at = at.clamp(min=0).expand(b, h, n)
    alone = (answer.lse == NEVER) & real.unsqueeze(1)
    lse = (wide(q) * wide(take(k, at))).sum(-1) * scale
    out = torch.where(alone.unsqueeze(-1), take(v, at).to(answer.out.dtype), answer.out)
    return Attended(out, torch.where(alone, lse, answer.lse))
