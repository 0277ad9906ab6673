"""Reformer's LSH attention (Kitaev et al. 2020), the papers' lsh-X: queries are their own keys."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

from torch import Tensor

from .._errors import check_whole
from .._types import Attended, Buckets, Call, Groups, Method


@dataclass(frozen=True, kw_only=True)
class Reformer(Method):
    """Self-attention with shared queries and keys: the keys are the unit-norm queries, **k is not used**.

    Tokens are sorted by a random cross-polytope hash and cut into chunks; a chunk sees itself and the one before it
    (around the circle, within its round). A token sees itself only when it sees nobody else. Two scalings are
    published: the default scale (1/sqrt(d), reformer-pytorch), and none after the normalisation (trax, Hugging Face):
    scale=1.0.

    Args:
        rounds: of hashing; their answers are merged
        chunk: tokens in a chunk; it sees itself and the chunk before it
    """

    name: ClassVar[str] = "reformer"
    causality: ClassVar[str] = "value"
    self_only: ClassVar[bool] = True
    shared_qk: ClassVar[bool] = True
    groups_type: ClassVar[type | None] = Buckets

    rounds: int = 4
    chunk: int = 32

    def __post_init__(self) -> None:
        check_whole("Reformer", rounds=self.rounds, chunk=self.chunk)

    def group(self, q: Tensor, k: Tensor, call: Call) -> tuple[Buckets, None]:
        q, valid = q.detach(), seated(q, call)
        each = (max(-(-q.shape[2] // self.chunk), 1) + 1) // 2
        drawn = call.ops.directions(self.rounds, each, q.shape[-1], call.seed, q)
        used = None if valid is None else (-(-valid.sum(-1, keepdim=True) // self.chunk)).clamp(min=1)
        hashes = call.ops.polytope(q, drawn, used)
        queries, keys = call.ops.chunked(hashes, valid, chunk=self.chunk)
        return Buckets(queries, keys, self.rounds, copies=2), None  # its own chunk's and the one before

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        assert isinstance(groups, Buckets)
        k = call.ops.unit(q)
        if v.shape[1] != q.shape[1]:
            v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        # a pair met in every round weighs as much as in one: the lse is a mean over rounds
        answer: Attended = call.ops.bucketed(
            q, k, v, groups, call.mask, call.scale, others=True, less=log(self.rounds), or_self=True
        )
        return answer

    def cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        hashing = n * d * -(-n // self.chunk)
        return self.rounds * (hashing + n * min(2 * self.chunk, n) * (d + e))


def seated(q: Tensor, call: Call) -> Tensor | None:
    """(b n): who takes part where queries and keys are the same tokens; None where there is no padding anywhere."""
    if call.mask.queries is None and call.mask.keys is None:
        return None
    return call.mask.query_rows(q) & call.mask.key_rows(q)
