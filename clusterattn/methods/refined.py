"""Refined clustered attention (ours): Improved with a better grouping, and the far keys to first order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from .._errors import bad_value
from . import budgets
from .budgets import SIZES
from .improved import Improved

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Refined(Improved):
    """Five changes to Improved, each measured on real models:

    Args:
        clusters: how many clusters; None: as the shape of the call asks
        top: near keys of a cluster; None: as the shape of the call asks
        parts: the far keys fall into parts, by k-means of keys beside their values: every cluster sees each part as one
            virtual key. A part for every key is exact attention
        slope: the far values move with the query to first order as well: out += scale w_far(q) (q - c) M with one
            matrix M per head
        steps: assignments of k-means; None: as the shape of the call asks
        metric: k-means measures the distance between queries as the keys see it: no hashing, S = Cov(K) per head
        start: short calls start from queries that lie far apart ("far"), since outlying queries matter most; long ones
            from random queries, with one more step, which is as good there
        mass: the far part weighs lse_far(c) + scale (q - c) . k_far(c) for query q: log-sum-exp to first order.
            Convexity keeps that below the truth, so lse(Refined) <= lse(Exact)
        budget: share of exact attention's multiply-adds that open sizes may take, grouping included

    Sizes that are left out (None) are chosen from the shape of the call, see ``ca.Refined().at(n, m, d, e)`` and
    methods/budgets.py; ``budget`` is the share of exact attention's multiply-adds that they may take, grouping included
    (0.05: five per cent). ``steps``, ``sample`` and ``rank``, the effort of the grouping, are chosen together: with
    steps given, the other two mean all when left out. Clusters that are chosen for a causal call are shared by the
    query heads of a key head, as many in all as without (``share_heads``; with clusters given, None is False).
    """

    name: ClassVar[str] = "refined"

    clusters: int | None = None  # type: ignore[assignment]
    top: int | None = None  # type: ignore[assignment]
    parts: int | None = None  # type: ignore[assignment]
    slope: bool | None = None  # type: ignore[assignment]
    steps: int | None = None  # type: ignore[assignment]
    metric: str = "keys"
    start: str | None = None  # type: ignore[assignment]
    mass: str = "tangent"
    share_heads: bool | None = None  # type: ignore[assignment]
    budget: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is None:
            return
        if isinstance(self.budget, bool) or not isinstance(self.budget, (int, float)) or not self.budget > 0:
            raise bad_value("Refined(budget=a share of exact attention > 0)", f"budget={self.budget!r}", "budget=0.05")
        if all(getattr(self, name) is not None for name in SIZES[:4]):
            given = ", ".join(f"{name}={getattr(self, name)}" for name in SIZES[:4])
            raise bad_value("a budget, or all sizes", f"budget={self.budget} beside {given}", "leaving out one of them")

    def at(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> Self:
        if causal and self.parts is not None and self.parts != 1:
            raise bad_value("parts=1 in a causal call", f"parts={self.parts}", "parts=1, or leaving it out")
        if any(getattr(self, name) is None for name in SIZES):
            return budgets.fill(self, budgets.Shape(n, m, d, e, causal, group))  # type: ignore[return-value]
        if self.start is None:  # with steps given it does not depend on the shape
            return replace(self, start="far").at(n, m, d, e, causal=causal, group=group)
        return super().at(n, m, d, e, causal=causal, group=group)
