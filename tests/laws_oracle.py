"""The oracle's answer for a method of the list, with the groups given."""

from __future__ import annotations

from typing import Any

import oracle
from laws import Case, Inputs
from torch import Tensor

import clusterattn as ca


def expected_rows(
    case: Case, x: Inputs, groups: Any, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The weights (b h n m) and log-weights (b h n) this method must have on these groups."""
    method, q, k, seen = case.method, x.q, x.k, x.seen_when(causal)
    if case.family:
        parts = None if groups.parts is None else groups.parts.labels
        top, mass, slope = (
            getattr(method, name, other) for name, other in (("top", 0), ("mass", "tangent"), ("slope", False))
        )
        share = q.shape[1] // k.shape[1] if method.share_heads else 1
        kept = oracle.Kept(top, mass, parts, slope, scale, share)
        if causal:
            lag = 1 if method.centroids_from == "past" else 0
            return oracle.block_causal_rows(
                q, k, groups.labels, groups.member_of, seen, kept, block=method.block, lag=lag
            )
        return oracle.clustered_rows(q, k, groups.labels, seen, kept)
    if isinstance(method, ca.Exact):
        return oracle.exact_rows(q, k, seen, scale)
    if isinstance(method, ca.OracleTop):
        return oracle.oracle_top_rows(q, k, seen, top=method.top, scale=scale)
    if isinstance(method, ca.Local):
        return oracle.local_rows(q, k, seen, window=method.window, causal=causal, scale=scale)
    how = {"scale": scale, "or_itself": causal}
    if isinstance(method, ca.Smyrf):
        how |= {"once": True} if method.dedup else {"rounds": method.rounds}
    if isinstance(method, ca.Reformer):
        k = oracle.unit(q)
        how |= {"rounds": method.rounds, "not_itself": True, "or_itself": True}
    return oracle.bucketed_rows(q, k, groups.queries, groups.keys, seen, **how)


def expected(
    case: Case, x: Inputs, groups: Any, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    return oracle.answer(expected_rows(case, x, groups, causal, scale), x.v)
