"""Random numbers for tokens, and seats in the order of those numbers: plain torch, any device, any float dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tables
from .._chunks import wide
from ..kmeans import assign


def scores(
    q: Tensor, k: Tensor, drawn: Tensor, valid_q: Tensor | None, valid_k: Tensor | None, lifted: bool
) -> tuple[Tensor, Tensor]:
    q, k, d = wide(q), wide(k).repeat_interleave(q.shape[1] // k.shape[1], 1), q.shape[-1]
    drawn = drawn.to(q.dtype)
    score_q, score_k = (drawn[:, :d] @ x.mT for x in (q, k))
    if lifted:
        lift_q, lift_k = lifts(q, k, valid_q, valid_k)
        score_q = score_q + drawn[:, d + 1, None] * lift_q.unsqueeze(2)
        score_k = score_k + drawn[:, d, None] * lift_k.unsqueeze(2)
    return score_q, score_k


def lifts(q: Tensor, k: Tensor, valid_q: Tensor | None, valid_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """The extra coordinate of each query and key, (b h n) and (b h m), that brings all of them to one norm:
    P(q) = [q; 0; lift_q], Q(k) = [k; lift_k; 0] have |P| = |Q| and P(q).Q(k) = q.k. Padding has no say in the norm."""
    norm_q, norm_k = q.square().sum(-1), k.square().sum(-1)
    most = sum(
        (x if valid is None else x.masked_fill(~valid.unsqueeze(1), 0.0)).amax(-1, keepdim=True)
        for x, valid in ((norm_q, valid_q), (norm_k, valid_k))
    )
    return (most - norm_q).clamp(min=0).sqrt(), (most - norm_k).clamp(min=0).sqrt()


def polytope(x: Tensor, drawn: Tensor, buckets: Tensor | None) -> Tensor:
    x, directions = wide(x), drawn.shape[1]
    drawn = drawn.to(x.dtype)
    half = x.new_full((x.shape[0], 1), directions, dtype=torch.int64) if buckets is None else (buckets + 1) // 2
    taking_part = (torch.arange(directions, device=x.device) < half).repeat(1, 2).unsqueeze(1)  # (b 1 2*directions)
    hashes = []
    for one in range(drawn.shape[0]):
        both = torch.cat([drawn[one], -drawn[one]]).expand(*x.shape[:2], -1, -1)
        which = assign(x, both, taking_part)  # the largest product
        hashes.append(torch.where(which < directions, which, which - directions + half.view(-1, 1, 1)))
    return torch.stack(hashes, 2)


def _all(valid: Tensor | None, x: Tensor) -> Tensor:
    """Who is real, (b n), also when everybody is: x (b h r n)."""
    return x.new_ones(x.shape[0], x.shape[3], dtype=torch.bool) if valid is None else valid


def balanced(
    score_q: Tensor, score_k: Tensor, valid_q: Tensor | None, valid_k: Tensor | None, q_seats: int, k_seats: int
) -> tuple[Tensor, Tensor]:
    (b, h, r, n), m = score_q.shape, score_k.shape[3]
    valid_q, valid_k = _all(valid_q, score_q), _all(valid_k, score_k)
    real_q, real_k = valid_q.sum(-1), valid_k.sum(-1)
    needed = torch.maximum(-(-real_q // q_seats), -(-real_k // k_seats)).clamp(min=1).view(-1, 1, 1)
    most = max(-(-n // q_seats), -(-m // k_seats), 1)
    bucket = torch.arange(most, device=score_q.device)

    def seat(scores: Tensor, valid: Tensor, real: Tensor, seats: int, shared: int) -> Tensor:
        """Cut the order of the scores into buckets, all rounds at once. ``shared``: a bucket's fewest tokens."""
        real = real.view(-1, 1, 1)
        order = tables.valid_first(scores, valid[:, None, None]).flatten(1, 2)  # (b h*r n)
        start, stop = bucket * real // needed, (bucket + 1) * real // needed
        stop = torch.maximum(stop, torch.minimum(start + shared, real))
        table = tables.cut(order, start, torch.where(bucket < needed, stop, start), seats)
        return table.view(b, h, r * most, seats)

    return seat(score_q, valid_q, real_q, min(q_seats, n), 0), seat(score_k, valid_k, real_k, min(k_seats, m), 1)


def chunked(hashes: Tensor, valid: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    b, h, r, n = hashes.shape
    valid = _all(valid, hashes)
    real = valid.sum(-1)
    most = max(-(-n // chunk), 1)
    start = (torch.arange(most, device=hashes.device) * chunk).expand(b, 1, -1)
    stop = torch.minimum(start + chunk, real.view(-1, 1, 1))
    order = tables.valid_first(hashes, valid[:, None, None]).flatten(1, 2)  # (b h*r n)
    table = tables.cut(order, start, stop, chunk)  # (b h*r chunks seats)
    keys = tables.look_back(table, -(-real // chunk), 2)
    return table.view(b, h, r * most, chunk), keys.view(b, h, r * most, 2 * chunk)


def unit(x: Tensor) -> Tensor:
    return F.normalize(wide(x), dim=-1).to(x.dtype)
