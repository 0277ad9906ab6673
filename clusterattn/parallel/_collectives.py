"""Sums and gathers over the ranks, with gradient, and a count of what they send."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Traffic:
    """What one rank sends, added up over the calls that are given it: ``attention(..., traffic=traffic)``.

    Counted as the ring algorithms send it: a sum over R ranks sends every number 2 (R - 1) / R times, a gather R - 1
    times. Backward adds to it when it runs.

    Attributes:
        sent: bytes
        calls: collectives
        by_what: bytes of each kind of message
    """

    sent: int = 0
    calls: int = 0
    by_what: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, amount: int) -> None:
        """Count one collective.

        Args:
            what: the kind of message
            amount: bytes
        """
        self.sent += amount
        self.calls += 1
        self.by_what[what] = self.by_what.get(what, 0) + amount


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a sequence, in its order."""

    group: dist.ProcessGroup | None  # None: all of them
    traffic: Traffic | None = None

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def mine(self) -> int:
        return dist.get_rank(self.group)

    def _count(self, what: str, x: Tensor, numerator: int, denominator: int) -> None:
        if self.traffic is not None:
            self.traffic.add(what, numerator * x.numel() * x.element_size() // denominator)

    def gather(self, x: Tensor, what: str) -> Tensor:
        """x of every rank, all of one shape: (ranks ...). Without gradient."""
        x = x.detach().contiguous()
        self._count(what, x, self.size - 1, 1)
        found = [torch.zeros_like(x) for _ in range(self.size)]
        dist.all_gather(found, x, group=self.group)
        return torch.stack(found)

    def reduce(self, x: Tensor, what: str, by: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """The sum (or another ``by``) over the ranks, the same bits on all of them. Without gradient."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        self._count(what, total, 2 * (self.size - 1), self.size)
        dist.all_reduce(total, op=by, group=self.group)
        return total

    def highest(self, x: Tensor, what: str) -> Tensor:
        return self.reduce(x, what, dist.ReduceOp.MAX)

    def sum(self, x: Tensor, what: str) -> Tensor:
        """The sum over the ranks, with gradient: every rank's answer depends on it, so their gradients are summed."""
        total: Tensor = _Sum.apply(x, self, what)  # type: ignore[no-untyped-call]
        return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, what: str) -> Tensor:
        ctx.ranks, ctx.what = ranks, what
        return ranks.reduce(x, what)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.reduce(d_total, f"{ctx.what}, backward"), None, None
