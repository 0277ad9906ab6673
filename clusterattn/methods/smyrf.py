"""SMYRF (Daras et al. 2020): balanced buckets from random projections of queries and keys, transformed to match."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .._errors import check_choice, check_whole
from .._types import Attended, Buckets, Call, Groups, Method
from ..ops._chunks import wide

TRANSFORMS = ("asymmetric", "e2lsh", "crosspolytope")


@dataclass(frozen=True, kw_only=True)
class Smyrf(Method):
    """Sort queries and keys by a random score, cut both orders into equally many buckets; repeat, and merge by lse.

    Args:
        rounds: of hashing; their answers are merged
        q_seats: queries in a bucket
        k_seats: keys in a bucket
        transform: "asymmetric" lifts q and k to one norm so that near means a large product; "e2lsh" projects them as
            they are, "crosspolytope" sorts by the nearest of random directions (the rebuttal's ablation)
        dedup: a pair that meets in several rounds counts once; the original counts it each time
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
        q, k, ops = q.detach(), k.detach(), call.ops
        valid_q, valid_k = call.mask.queries, call.mask.keys
        if self.transform == "crosspolytope":
            score_q, score_k = self._hashes(q, k, call)
        else:
            drawn = ops.directions(self.rounds, 1, q.shape[-1] + 2, call.seed, q).squeeze(1)
            lifted = self.transform == "asymmetric"
            score_q, score_k = ops.scores(q, k, drawn, valid_q, valid_k, lifted=lifted)
        queries, keys = ops.balanced(score_q, score_k, valid_q, valid_k, q_seats=self.q_seats, k_seats=self.k_seats)
        enough = valid_k is None and k.shape[2] * self.q_seats >= q.shape[2]  # else buckets may share a key
        return Buckets(queries, keys, self.rounds, copies=int(enough)), None

    def _hashes(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """The nearest of as many random directions as there are buckets, for queries and keys alike."""
        most = max(-(-q.shape[2] // self.q_seats), -(-k.shape[2] // self.k_seats), 1)
        needed = None
        if call.mask.queries is not None or call.mask.keys is not None:
            sides = (call.mask.query_rows(q), self.q_seats), (call.mask.key_rows(k), self.k_seats)
            needed = torch.maximum(*((-(-real.sum(-1, keepdim=True) // seats)) for real, seats in sides)).clamp(min=1)
        drawn = call.ops.directions(self.rounds, (most + 1) // 2, q.shape[-1], call.seed, q)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        hash_q, hash_k = (call.ops.polytope(F.normalize(wide(x), dim=-1), drawn, needed) for x in (q, k))
        return hash_q, hash_k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        assert isinstance(groups, Buckets)
        meetings = self._meetings(groups, q.shape[2], k.shape[2]) if self.dedup else None
        # a pair met in every round weighs as much as in one: the lse is a mean over rounds
        less = 0.0 if self.dedup else log(self.rounds)
        answer: Attended = call.ops.bucketed(
            q, k, v, groups, call.mask, call.scale, meetings=meetings, less=less, or_self=call.mask.causal
        )
        return answer

    def _meetings(self, groups: Buckets, n: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each round: the half-open span of ranks of the keys in every query's bucket, and the rank of every key.

        A bucket holds neighbours in the order of the scores. With fewer keys than buckets they share keys; a key's rank
        is its first seat, so that ranks keep the order and each pair is counted where it meets."""
        (b, h, g, s), z = groups.queries.shape, groups.keys.shape[-1]
        each, device = g // self.rounds, groups.queries.device
        shape, nobody = (b, h, self.rounds), each * z  # a rank beyond all

        keys = groups.keys.reshape(*shape, nobody)
        seat, key = torch.arange(nobody, device=device).expand_as(keys), torch.where(keys < 0, m, keys)
        rank = torch.full((*shape, m + 1), nobody, device=device).scatter_reduce(3, key, seat, "amin")
        ranks = rank.gather(3, key).view(*shape, each, z)
        seated = (keys >= 0).view(*shape, each, z)
        low, high = torch.where(seated, ranks, nobody).amin(-1), torch.where(seated, ranks + 1, 0).amax(-1)

        queries = groups.queries.reshape(*shape, each * s)
        bucket = torch.arange(each, device=device).repeat_interleave(s).expand_as(queries)
        home = torch.full((*shape, n + 1), -1, device=device)
        home = home.scatter(3, torch.where(queries < 0, n, queries), bucket)[..., :n]
        span = [torch.where(home < 0, 0, side.gather(3, home.clamp(min=0))) for side in (low, high)]
        return span[0], span[1], rank[..., :m].contiguous()

    def cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        most = max(-(-n // self.q_seats), -(-m // self.k_seats))
        pairs = most * -(-n // most) * -(-m // most)
        width = d * most if self.transform == "crosspolytope" else d + 2
        return self.rounds * ((n + m) * width + pairs * (d + e))
