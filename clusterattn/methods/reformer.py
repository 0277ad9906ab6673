"""Reformer's LSH attention (Kitaev et al. 2020), the papers' lsh-X: queries are their own keys."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _draw
from .._errors import check_whole
from .._types import Attended, Buckets, Call, Groups, Method
from ..ops import tables
from ..ops._chunks import wide
from ._shared import or_self, polytope


@dataclass(frozen=True, kw_only=True)
class Reformer(Method):
    """Self-attention with shared queries and keys: the keys are the unit-norm queries, **k is not used**.

    Tokens are sorted by a random cross-polytope hash and cut into chunks; a chunk sees itself and the one before it
    (around the circle, within its round). A token sees itself only when it sees nobody else. Two scalings are
    published: the default scale (1/sqrt(d), reformer-pytorch), and none after the normalisation (trax, Hugging Face):
    scale=1.0.
    """

    name: ClassVar[str] = "reformer"
    causality: ClassVar[str] = "value"
    self_only: ClassVar[bool] = True
    groups_type: ClassVar[type | None] = Buckets

    rounds: int = 4
    chunk: int = 32

    def __post_init__(self) -> None:
        check_whole("Reformer", rounds=self.rounds, chunk=self.chunk)

    def group(self, q: Tensor, k: Tensor, call: Call) -> tuple[Buckets, None]:
        q = wide(q.detach())
        valid = seated(q, call)
        real = valid.sum(-1)
        used, most = -(-real // self.chunk), max(-(-q.shape[2] // self.chunk), 1)
        drawn = _draw.directions(self.rounds, (most + 1) // 2, q.shape[-1], call.seed, q)
        hashes = polytope(q, drawn, used.clamp(min=1).unsqueeze(-1), call)
        start = (torch.arange(most, device=q.device) * self.chunk).expand(q.shape[0], 1, -1)
        stop = torch.minimum(start + self.chunk, real.view(-1, 1, 1))
        order = tables.valid_first(hashes, valid[:, None, None]).flatten(1, 2)  # (b h*r n)
        table = tables.cut(order, start, stop, self.chunk)  # (b h*r chunks seats)
        keys = tables.look_back(table, used, 2)
        table, keys = (x.view(*q.shape[:2], self.rounds * most, x.shape[-1]) for x in (table, keys))
        return Buckets(table, keys, self.rounds), None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        assert isinstance(groups, Buckets)
        k = F.normalize(wide(q), dim=-1).to(q.dtype)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        answer = call.ops.bucketed(q, k, v, groups, call.mask, call.scale, others=True)
        # a pair met in every round weighs as much as in one: the lse is a mean over rounds
        answer = Attended(answer.out, answer.lse - log(self.rounds))
        return or_self(answer, q, k, v, call)

    def cost(self, n: int, m: int, d: int, e: int) -> int:
        hashing = n * d * -(-n // self.chunk)
        return self.rounds * (hashing + n * min(2 * self.chunk, n) * (d + e))


def seated(q: Tensor, call: Call) -> Tensor:
    """(b n): who takes part where queries and keys are the same tokens."""
    return call.mask.query_rows(q) & call.mask.key_rows(q)
