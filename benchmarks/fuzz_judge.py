"""What `fuzz.py` calls wrong: a kernel's answer to one case, held to the two rules of the laws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from fuzz_cases import DTYPES, Case, Inputs, inputs, laid
from torch import Tensor

import clusterattn as ca
from clusterattn.measure.bench import RoundedProducts
from clusterattn.ops._ahead import Rehearsal
from clusterattn.ops._launch import recording
from clusterattn.ops.coarse import kernels as coarse_kernels
from clusterattn.ops.coarse import reference as coarse

PARTS = ("out", "lse", "dq", "dk", "dv")
LOOSE_CLUSTERS = 1.1  # the kernel's clusters may be so much wider than the reference's

# ---------------------------------------------------------------------------------------------------- near keys


class Near:
    """The near keys that a kernel chose, put in the place of the reference's own; and how good they were."""

    def __init__(self, eps: float) -> None:
        self.eps, self.worst = eps, 0.0
        self.chosen: Tensor | None = None
        self._sequence = 0

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Note what kernels choose: (b*h c t)."""
        select = coarse_kernels.select

        def noted(c: Tensor, keys: Any, reach: Any, top: int) -> tuple[Tensor, Tensor]:
            near, *bits = select(c, keys, reach, top)
            if isinstance(recording.tape, Rehearsal):  # a first call is compiled first, and nothing is launched
                return near, *bits
            if self.chosen is None:  # a call may be made once more, to be written down
                self.chosen = near
            return near, *bits

        coarse_kernels.select = noted
        try:
            yield
        finally:
            coarse_kernels.select = select

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The reference takes them."""
        if self.chosen is None:
            yield
            return
        best, one = coarse._best, coarse._forward
        self._sequence = 0

        def forward(c: Tensor, k: Tensor, *rest: Any) -> Any:
            (b, h), hk = c.shape[:2], k.shape[1]
            assert self.chosen is not None
            lead = self.chosen.shape[0] // h  # batch of the whole call
            table = self.chosen.view(lead, h, *self.chosen.shape[1:])
            mine = table if b == lead else table[self._sequence : self._sequence + 1]
            self._sequence = (self._sequence + 1) % lead if b != lead else 0
            self._table = mine.reshape(b * hk, h // hk, *mine.shape[2:])
            self._m = k.shape[2]
            return one(c, k, *rest)

        coarse._best, coarse._forward = self._given, forward
        try:
            yield
        finally:
            coarse._best, coarse._forward = best, one

    def _given(self, p: Any, keys: Any, few: int) -> tuple[Tensor, Tensor]:
        at = self._table[p.heads][:, :, p.rows][..., :few]
        at = at.reshape(*p.scores.shape[:2], few)
        real = at >= 0
        places = keys.places(self._m)
        if places is not None:
            at = places[p.heads].gather(1, at.clamp(min=0).flatten(1)).view_as(at)
        at = torch.where(real, at, at.where(real, -1).amax(-1, keepdim=True).clamp(min=0))  # hidden with one of them
        best = torch.where(real, p.scores.gather(-1, at), float("-inf"))
        if p.scores.dtype == torch.float64:  # how much better was the best of the others?
            others = p.scores.scatter(-1, at, float("-inf")).amax(-1)
            least = torch.where(real, best, float("inf")).amin(-1)
            size = p.c.norm(dim=-1) * p.k.norm(dim=-1).amax(-1, keepdim=True) * self._scale
            gap = torch.where(others.isfinite(), (others - least) / (4 * self.eps * size.clamp(min=1e-6)), 0.0)
            self.worst = max(self.worst, float(gap.amax()) if gap.numel() else 0.0)
        return best, at

    _table: Tensor
    _m: int
    _scale: float = 1.0


# ---------------------------------------------------------------------------------------------------- one case


def answers(
    x: Case, given: Inputs, dtype: torch.dtype, backend: str, groups: Any, poison: bool = False
) -> list[Tensor | None]:
    """out, lse, dq, dk, dv."""
    leaves = []
    for name, mask in (("q", given.query_mask), ("k", given.key_mask), ("v", given.key_mask)):
        t = getattr(given, name).to(dtype)
        if poison and mask is not None:
            t = t.masked_fill(~mask[:, None, :, None], float("nan"))
        leaves.append(laid(t, x.layout if poison else "plain").detach().requires_grad_())
    out, lse = ca.attention(
        *leaves,
        method=x.method,
        causal=x.causal,
        key_mask=given.key_mask,
        query_mask=given.query_mask,
        groups=groups,
        backend=backend,
        return_lse=True,
        seed=x.seed,
    )
    total = (out * given.d_out.to(dtype)).sum()
    total = total + (torch.where(lse.isfinite(), lse, 0.0) * given.d_lse.to(lse.dtype)).sum()
    with torch.autograd.set_multithreading_enabled(False):  # rounded products belong to this thread
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [out.detach(), lse.detach(), *grads]


def spread(q: Tensor, clusters: ca.Clusters) -> Tensor:
    """Mean squared distance of the queries from the centroids of their members."""
    labels, means = clusters.member_of, clusters.means.float()
    mine = means.gather(2, labels.clamp(min=0).unsqueeze(-1).expand(*labels.shape, means.shape[-1]))
    return ((q.float() - mine).square().sum(-1) * (labels >= 0)).sum()


def faults(x: Case) -> list[str]:
    """What is wrong with the kernels' answer; nothing where it is right."""
    dtype, given = DTYPES[x.dtype], inputs(x)
    call: dict[str, Any] = {"method": x.method, "causal": x.causal, "seed": x.seed}
    call |= {"key_mask": given.key_mask, "query_mask": given.query_mask}
    qkv, found = (given.q, given.k, given.v), []
    if x.given:
        handed = groups = ca.groups(*(t.double() for t in qkv), backend="reference", **call)
    else:
        handed, groups = None, ca.groups(*qkv, backend="triton", **call)
        if isinstance(groups, ca.Clusters) and groups.means.numel():
            usual = ca.groups(*qkv, backend="reference", **call)
            wide, right = float(spread(given.q, groups)), float(spread(given.q, usual))
            if not wide <= LOOSE_CLUSTERS * right + 1e-3 * float(given.q.float().square().sum()):
                found.append(f"clusters are loose: {wide:.4g}, the reference's {right:.4g}")
    near = Near(torch.finfo(dtype).eps)
    near._scale = x.d**-0.5
    with near.seen():
        kernel = answers(x, given, dtype, "triton", handed, poison=True)
    if handed is None:  # a call that was made before is replayed: with other numbers, then with these
        for seed in range(2):
            answers(x, inputs(replace(x, seed=seed)), dtype, "triton", None)
    again = answers(x, given, dtype, "triton", handed, poison=True)
    with near.taken():
        exact = answers(x, given, torch.float64, "reference", groups)
        yardsticks = [answers(x, given, dtype, "reference", groups)]
        with RoundedProducts(dtype):
            yardsticks.append(answers(x, given, dtype, "reference", groups))
    if near.worst > 1:
        found.append(f"near keys: one left out was better by {near.worst:.3g} times what rounding allows")
    assert exact[1] is not None
    level = exact[1][exact[1].isfinite()].abs()
    rounding = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * (float(level.max()) if level.numel() else 0.0)
    for place, name in enumerate(PARTS):
        ours, right, usual = kernel[place], exact[place], [each[place] for each in yardsticks]
        if right is None or ours is None:
            if (right is None) != (ours is None) and float((right if ours is None else ours).abs().max()):
                found.append(f"{name}: only one of kernel and reference has it")
            continue
        if not torch.equal(ours.nan_to_num(), again[place].nan_to_num()):
            found.append(f"{name}: not the same bits twice")
        found += compared(name, ours, right, [one for one in usual if one is not None], rounding)
    return found


def compared(name: str, ours: Tensor, right: Tensor, usual: Sequence[Tensor], eps: float) -> list[str]:
    finite = right.isfinite()
    if not torch.equal(ours.isfinite(), finite):
        return [f"{name}: {int((ours.isfinite() != finite).sum())} numbers are finite in one alone"]
    times, truth = 2 if name in PARTS[:2] else 3, right[finite]
    if not truth.numel():
        return []
    miss, errors = ours.double()[finite] - truth, [one.double()[finite] - truth for one in usual]
    for what, size, roundings in (("largest", lambda t: float(t.abs().max()), 8), ("l2", lambda t: float(t.norm()), 1)):
        allowed = max(times * max(size(one) for one in errors), roundings * eps * size(truth))
        if not size(miss) <= allowed:
            return [f"{name}: {what} error {size(miss):.3g}, allowed {allowed:.3g}"]
    return []
