"""Oracle-top (the papers' baseline): the true best keys of every query, and nothing else. Quadratic; for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._errors import check_whole
from .._types import Attended, Buckets, Call, Groups, Method
from .exact import pairs


@dataclass(frozen=True, kw_only=True)
class OracleTop(Method):
    """?

    Args:
        top: best keys of each query
    """

    name: ClassVar[str] = "oracle_top"
    causality: ClassVar[str] = "strict"
    groups_type: ClassVar[type | None] = Buckets

    top: int = 32

    def __post_init__(self) -> None:
        check_whole("OracleTop", top=self.top)

    def group(self, q: Tensor, k: Tensor, call: Call) -> tuple[Buckets, None]:
        queries = torch.arange(q.shape[2], device=q.device).view(1, 1, -1, 1).expand(*q.shape[:3], 1)
        return Buckets(queries, call.ops.top_keys(q, k, call.mask, call.scale, self.top)), None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        assert isinstance(groups, Buckets)
        answer: Attended = call.ops.bucketed(q, k, v, groups, call.mask, call.scale)
        return answer

    def cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        return pairs(n, m, causal) * d + n * min(self.top, m) * (d + e)
