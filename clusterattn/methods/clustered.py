"""Clustered attention (Vyas et al. 2020): queries that are alike share one answer, their centroid's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .._errors import check_choice, check_whole
from .._types import Attended, Call, Clusters, Groups, Method
from ..ops._chunks import wide
from ..ops.coarse import Coarse
from ..ops.merge import NEVER, merge
from . import _grouping
from ._grouping import METRICS, STARTS
from ._shared import count, own_block


@dataclass(frozen=True, kw_only=True)
class Clustered(Method):
    """Hash every query to ``bits`` signs, group the codes by Hamming k-means, let the centroids attend.

    metric   "hamming" (the paper), "euclid", or "keys" (distance as the keys see it, see Refined)
    start    "random" queries, or "far": queries that lie far apart
    sample   train k-means on that many queries, then assign all; None trains on all of them
    bias     random thresholds in the hash, as the old code had them; the paper's threshold is 0
    block    causal only: positions are cut into blocks; a block attends to itself exactly, to earlier keys by centroids
    centroids_from  causal only: "past" (the previous block's queries: strictly causal) or "block" (its own:
             value-causal)
    """

    name: ClassVar[str] = "clustered"
    groups_type: ClassVar[type | None] = Clusters

    clusters: int = 100
    bits: int = 63
    steps: int = 10
    metric: str = "hamming"
    start: str = "random"
    sample: int | None = None
    bias: bool = False
    block: int = 256
    centroids_from: str = "past"

    def __post_init__(self) -> None:
        who = type(self).__name__
        check_whole(who, clusters=self.clusters, bits=self.bits, steps=self.steps, block=self.block)
        if self.sample is not None:
            check_whole(who, sample=self.sample)
        check_choice(who, "metric", self.metric, METRICS)
        check_choice(who, "start", self.start, STARTS)
        check_choice(who, "centroids_from", self.centroids_from, ("past", "block"))

    @property
    def causality(self) -> str:  # type: ignore[override]
        return "strict" if self.centroids_from == "past" else "value"

    # ------------------------------------------------------------------ who is alike

    def group(self, q: Tensor, k: Tensor, call: Call) -> tuple[Clusters, None]:
        q, k = q.detach(), k.detach()
        labels, members, clusters = (self._by_block if call.mask.causal else self._whole)(q, k, call)
        counts = count(members, clusters)
        return Clusters(labels, counts, call.ops.means(q, members, counts), members), None

    def _whole(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, int]:
        b, h, n, d = q.shape
        valid = call.mask.query_rows(q).unsqueeze(1)  # (b 1 n)
        alone = _grouping.ranks(valid).expand(b, h, n)
        if self.clusters >= n:
            return alone, alone, n
        form = call.ops.covariance(k, call.mask.keys, h) if self.metric == "keys" else None
        where = self._space(d, form, call, q.device)
        points = where.points(q, call)
        labels = self._centres(points, valid, where, call).assign(points, call)
        labels = torch.where(valid, labels, -1)
        # No more real queries than clusters: each is its own cluster, as it would be without the padding.
        labels = torch.where(valid.sum(-1, keepdim=True) <= self.clusters, alone, labels)
        return labels, labels, self.clusters

    def _by_block(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, int]:
        """Centroids for every block but the first, numbered block by block."""
        b, h, n, d = q.shape
        blocks = (n + self.block - 1) // self.block
        nobody = torch.full((b, h, n), -1, dtype=torch.int64, device=q.device)
        if blocks <= 1:
            return nobody, nobody, 0
        width = blocks * self.block
        x = F.pad(q, (0, 0, 0, width - n)).view(b, h, blocks, self.block, d)
        valid = F.pad(call.mask.query_rows(q), (0, width - n)).view(b, 1, blocks, self.block)
        past = self.centroids_from == "past"
        source = slice(0, blocks - 1) if past else slice(1, blocks)
        form = None
        if self.metric == "keys":
            absent = max(-call.mask.offset, 0)  # with fewer keys than queries the first positions have no key
            keys, real = F.pad(k, (0, 0, absent, 0)), F.pad(call.mask.key_rows(q), (absent, 0))
            first = call.mask.offset + absent + self.block
            form = _grouping.prefix_covariances(keys, real, h, first, self.block, blocks - 1)
        where = self._space(d, form, call, q.device)
        points = where.points(x, call)
        centres = self._centres(points[:, :, source], valid[:, :, source], where, call)
        clusters = centres.centroids.shape[-2]
        shift = (torch.arange(blocks - 1, device=q.device) * clusters).view(-1, 1)

        def numbered(labels: Tensor, real: Tensor, before: int, after: int) -> Tensor:
            labels = torch.where(real, labels + shift, -1)
            return F.pad(labels, (0, 0, before, after), value=-1).view(b, h, width)[..., :n]

        members = centres.assign(points[:, :, source], call)
        if not past and clusters >= self.block:
            members = _grouping.ranks(valid[:, :, source]).expand(b, h, -1, -1)
        made = numbered(members, valid[:, :, source], 0 if past else 1, 1 if past else 0)
        if not past:
            return made, made, (blocks - 1) * clusters
        answered = centres.assign(points[:, :, 1:], call)
        return numbered(answered, valid[:, :, 1:], 1, 0), made, (blocks - 1) * clusters

    def _space(self, d: int, form: Tensor | None, call: Call, device: torch.device) -> _grouping.Space:
        return _grouping.space(self.metric, d, self.bits, self.bias, form, call, device)

    def _centres(self, points: Tensor, valid: Tensor, where: _grouping.Space, call: Call) -> _grouping.Centres:
        return _grouping.centres(points, valid, self.clusters, self.steps, self.start, self.sample, where, call)

    # ------------------------------------------------------------------ what they answer

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        assert isinstance(groups, Clusters)
        if groups.counts.shape[-1] == 0:
            return own_block(q, k, v, self.block, call)
        means = call.ops.means(q, groups.members, groups.counts)
        if not call.mask.causal:
            return self._answer(q, k, v, means, groups.labels, call, (0, 0, 0))
        blocks = (q.shape[2] + self.block - 1) // self.block
        reach = (means.shape[2] // (blocks - 1), call.mask.offset + self.block, self.block)
        before = self._answer(q, k, v, means, groups.labels, replace(call, lse=True), reach)
        return merge(own_block(q, k, v, self.block, call), before)

    def _answer(
        self, q: Tensor, k: Tensor, v: Tensor, means: Tensor, labels: Tensor, call: Call, reach: Any
    ) -> Attended:
        """Everybody hears the centroid; the log-weight, when wanted, is the tangent at the centroid (see Refined)."""
        said: Coarse = call.ops.coarse(means, k, v, call.mask, call.scale, top=0, tangent=call.lse, blocks=reach)
        lse, hand = said.far.lse, call.ops.broadcast
        if call.lse:
            lse = lse - (wide(means) * said.mean_key).sum(-1) * call.scale
        lse = torch.where(labels < 0, NEVER, hand(lse, labels))
        if call.lse:
            lse = lse + (wide(q) * hand(said.mean_key, labels)).sum(-1) * call.scale
        return Attended(hand(said.far.out.to(v.dtype), labels), lse)

    # ------------------------------------------------------------------ what it costs

    def cost(self, n: int, m: int, d: int, e: int) -> int:
        return self._grouping_cost(n, m, d) + min(self.clusters, n) * m * (d + e)

    def _grouping_cost(self, n: int, m: int, d: int) -> int:
        if self.clusters >= n:
            return 0
        w = self.bits if self.metric == "hamming" else d
        train = min(self.sample or n, n)
        assigned = (self.steps - 1) * train + n
        total = assigned * self.clusters * w + (self.steps - 1) * train * w + n * d
        if self.metric == "hamming":
            total += n * d * self.bits
        if self.metric == "keys":
            total += m * d * d + self.steps * self.clusters * d * d
        if self.start == "far":
            pool = min(_grouping.FAR_POOL * self.clusters, n)
            total += pool * pool * w + (pool * d * d if self.metric == "keys" else 0)
        return total
