"""Local attention (the papers' baseline): every query sees the keys around its own position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._errors import check_whole
from .._types import Attended, Buckets, Call, Groups, Mask, Method


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """``window`` keys: half before and half after the query, or, causal, itself and those before it.

    Args:
        window: keys around a query that it sees; causal: itself and those before it
    """

    name: ClassVar[str] = "local"
    causality: ClassVar[str] = "strict"
    positional: ClassVar[bool] = True
    groups_type: ClassVar[type | None] = Buckets

    window: int = 32

    def __post_init__(self) -> None:
        check_whole("Local", window=self.window)

    def _reach(self, mask: Mask) -> tuple[int, int]:
        return (self.window - 1, 0) if mask.causal else ((self.window - 1) // 2, self.window // 2)

    def group(self, q: Tensor, k: Tensor, call: Call) -> tuple[Buckets, None]:
        (b, h, n), m = q.shape[:3], k.shape[2]
        left, right = self._reach(call.mask)
        blocks = -(-n // self.window)
        at = torch.arange(blocks * self.window, device=q.device).view(blocks, self.window)
        around = at[:, :1] + call.mask.offset - left + torch.arange(self.window + left + right, device=q.device)
        queries = torch.where(at < n, at, -1).expand(b, h, -1, -1)
        keys = torch.where((around >= 0) & (around < m), around, -1).expand(b, h, -1, -1)
        return Buckets(queries, keys), None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        assert isinstance(groups, Buckets)
        left, right = self._reach(call.mask)
        answer: Attended = call.ops.bucketed(q, k, v, groups, call.mask, call.scale, left=left, right=right)
        return answer

    def cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        """A block of ``window`` queries sits with all the keys that its first and its last one see."""
        return n * min(2 * self.window - 1, m) * (d + e)
