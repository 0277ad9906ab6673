"""SMYRF (Daras et al. 2020): balanced buckets from random projections of queries and keys, transformed to match."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _draw
from .._errors import check_choice, check_whole
from .._types import Attended, Buckets, Call, Groups, Method
from ..ops import tables
from ..ops._chunks import wide
from ._shared import or_self, polytope

TRANSFORMS = ("asymmetric", "e2lsh", "crosspolytope")


@dataclass(frozen=True, kw_only=True)
class Smyrf(Method):
    """Sort queries and keys by a random score, cut both orders into equally many buckets; repeat, and merge by lse.

    transform  "asymmetric" lifts q and k to one norm so that near means a large product; "e2lsh" projects them as they
               are, "crosspolytope" sorts by the nearest of random directions (the rebuttal's ablation)
    dedup      a pair that meets in several rounds counts once; the original counts it each time
    """

    name: ClassVar[str] = "smyrf"
    causality: ClassVar[str] = "value"
    groups_type: ClassVar[type | None] = Buckets

    rounds: int = 4
    q_seats: int = 64
    k_seats: int = 64
    transform: str = "asymmetric"
    dedup: bool = False

    def __post_init__(self) -> None:
        check_whole("Smyrf", rounds=self.rounds, q_seats=self.q_seats, k_seats=self.k_seats)
        check_choice("Smyrf", "transform", self.transform, TRANSFORMS)

    def group(self, q: Tensor, k: Tensor, call: Call) -> tuple[Buckets, None]:
        q, k = wide(q.detach()), wide(k.detach()).repeat_interleave(q.shape[1] // k.shape[1], 1)
        valid_q, valid_k = call.mask.query_rows(q), call.mask.key_rows(k)
        real_q, real_k = valid_q.sum(-1), valid_k.sum(-1)
        # The side that needs more buckets decides; the other spreads evenly over them.
        needed = torch.maximum(-(-real_q // self.q_seats), -(-real_k // self.k_seats)).clamp(min=1).view(-1, 1, 1)
        most = max(-(-q.shape[2] // self.q_seats), -(-k.shape[2] // self.k_seats), 1)
        score_q, score_k = self._scores(q, k, valid_q, valid_k, needed, most, call)  # (b h r n), (b h r m)
        bucket = torch.arange(most, device=q.device)

        def seat(scores: Tensor, valid: Tensor, real: Tensor, seats: int, shared: int) -> Tensor:
            """Cut the order of the scores into buckets, all rounds at once. ``shared``: a bucket's fewest tokens."""
            real = real.view(-1, 1, 1)
            order = tables.valid_first(scores, valid[:, None, None]).flatten(1, 2)  # (b h*r n)
            start, stop = bucket * real // needed, (bucket + 1) * real // needed
            stop = torch.maximum(stop, torch.minimum(start + shared, real))
            table = tables.cut(order, start, torch.where(bucket < needed, stop, start), seats)
            return table.view(*q.shape[:2], self.rounds * most, seats)

        queries = seat(score_q, valid_q, real_q, min(self.q_seats, q.shape[2]), 0)
        keys = seat(score_k, valid_k, real_k, min(self.k_seats, k.shape[2]), 1)
        return Buckets(queries, keys, self.rounds), None

    def _scores(
        self, q: Tensor, k: Tensor, valid_q: Tensor, valid_k: Tensor, needed: Tensor, most: int, call: Call
    ) -> tuple[Tensor, Tensor]:
        d = q.shape[-1]
        if self.transform == "crosspolytope":
            drawn = _draw.directions(self.rounds, (most + 1) // 2, d, call.seed, q)
            return polytope(F.normalize(q, dim=-1), drawn, needed[:, 0], call), polytope(
                F.normalize(k, dim=-1), drawn, needed[:, 0], call
            )
        drawn = _draw.directions(self.rounds, 1, d + 2, call.seed, q).squeeze(1)
        score_q, score_k = (drawn[:, :d] @ x.mT for x in (q, k))
        if self.transform == "asymmetric":
            lift_q, lift_k = lifts(q, k, valid_q, valid_k)
            score_q = score_q + drawn[:, d + 1, None] * lift_q.unsqueeze(2)
            score_k = score_k + drawn[:, d, None] * lift_k.unsqueeze(2)
        return score_q, score_k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        assert isinstance(groups, Buckets)
        meetings = self._meetings(groups, q.shape[2], k.shape[2]) if self.dedup else None
        answer = call.ops.bucketed(q, k, v, groups, call.mask, call.scale, meetings=meetings)
        if not self.dedup:  # a pair met in every round weighs as much as in one: the lse is a mean over rounds
            answer = Attended(answer.out, answer.lse - log(self.rounds))
        return or_self(answer, q, k, v, call) if call.mask.causal else answer

    def _meetings(self, groups: Buckets, n: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each round: the bucket of every query as a half-open span, and the bucket of every key."""
        b, h, g, _ = groups.queries.shape
        each = g // self.rounds
        at = torch.arange(each, device=groups.queries.device).view(1, 1, 1, each, 1)

        def home(table: Tensor, length: int) -> Tensor:
            seats = table.view(b, h, self.rounds, each, table.shape[-1])
            where = torch.full((b, h, self.rounds, length + 1), -1, dtype=torch.int64, device=table.device)
            index = torch.where(seats < 0, length, seats).flatten(3)
            return where.scatter(3, index, at.expand_as(seats).flatten(3))[..., :length]

        mine = home(groups.queries, n)
        # Keys are shared between neighbouring buckets only when there are fewer keys than buckets; a pair met in such a
        # bucket still counts at least once.
        return mine, torch.where(mine < 0, mine, mine + 1), home(groups.keys, m)

    def cost(self, n: int, m: int, d: int, e: int) -> int:
        most = max(-(-n // self.q_seats), -(-m // self.k_seats))
        pairs = most * -(-n // most) * -(-m // most)
        width = d * most if self.transform == "crosspolytope" else d + 2
        return self.rounds * ((n + m) * width + pairs * (d + e))


def lifts(q: Tensor, k: Tensor, valid_q: Tensor, valid_k: Tensor) -> tuple[Tensor, Tensor]:
    """The extra coordinate of each query and key, (b h n) and (b h m), that brings all of them to one norm:
    P(q) = [q; 0; lift_q], Q(k) = [k; lift_k; 0] have |P| = |Q| and P(q).Q(k) = q.k. Padding has no say in the norm."""
    norm_q, norm_k = q.square().sum(-1), k.square().sum(-1)
    most = sum(
        x.masked_fill(~valid.unsqueeze(1), 0.0).amax(-1, keepdim=True)
        for x, valid in ((norm_q, valid_q), (norm_k, valid_k))
    )
    return (most - norm_q).clamp(min=0).sqrt(), (most - norm_k).clamp(min=0).sqrt()
