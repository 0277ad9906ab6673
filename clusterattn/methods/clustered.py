"""Clustered attention (Vyas et al. 2020): queries that are alike share one answer, their centroid's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .._errors import bad_value, check_choice, check_whole
from .._types import Attended, Buckets, Call, Clusters, Groups, Method
from ..ops import draw
from ..ops._chunks import wide
from ..ops.coarse import Coarse
from ..ops.kmeans import Centres
from ..ops.merge import NEVER, merge
from . import _grouping, budgets
from ._grouping import METRICS, STARTS

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Clustered(Method):
    """Hash every query to ``bits`` signs, group the codes by Hamming k-means, let the centroids attend.

    Args:
        clusters: how many; no more than there are queries are made
        bits: of a query's hash
        steps: assignments of k-means; between them centres are updated
        metric: "hamming" (the paper), "euclid", or "keys" (distance as the keys see it, see Refined)
        start: "random" queries, or "far": queries that lie far apart
        sample: train k-means on that many queries, and take the keys' metric from that many keys; then assign all. None
            trains on all of them
        rank: k-means looks at the queries along that many main directions of the keys alone (metric="keys"); None: all
            d
        bias: random thresholds in the hash, as the old code had them; the paper's threshold is 0
        block: causal only: positions are cut into blocks; a block attends to itself exactly, to earlier keys by
            centroids. None: blocks that grow like sqrt(clusters * n), so that the whole costs n^1.5
        centroids_from: causal only: "past" (the previous block's queries: strictly causal) or "block" (its own:
            value-causal)
        share_heads: query heads that share a key head (grouped heads) share one set of ``clusters``: they see the same
            keys
    """

    name: ClassVar[str] = "clustered"
    groups_type: ClassVar[type | None] = Clusters

    clusters: int = 100
    bits: int = 63
    steps: int = 10
    metric: str = "hamming"
    start: str = "random"
    sample: int | None = None
    rank: int | None = None
    bias: bool = False
    block: int | None = None
    centroids_from: str = "past"
    share_heads: bool = False

    def __post_init__(self) -> None:
        who = type(self).__name__
        given = {name: getattr(self, name) for name in ("clusters", "bits", "steps", "block", "sample", "rank")}
        check_whole(who, **{name: value for name, value in given.items() if value is not None})
        check_choice(who, "metric", self.metric, METRICS)
        if self.rank is not None and self.metric != "keys":
            raise bad_value(f'{who}(rank=…) with metric="keys"', f"metric={self.metric!r}", "leaving out rank")
        if self.start is not None:  # open in Refined
            check_choice(who, "start", self.start, STARTS)
        check_choice(who, "centroids_from", self.centroids_from, ("past", "block"))

    @property
    def causality(self) -> str:  # type: ignore[override]
        """Strict with centroids from the past, value-causal with those of a block's own queries."""
        return "strict" if self.centroids_from == "past" else "value"

    def at(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> Self:
        if self.block is not None or not causal:
            return self
        return replace(self, block=budgets.block(n, self.clusters // self._heads_of_a_set(group)))

    # ------------------------------------------------------------------ who is alike

    def group(self, q: Tensor, k: Tensor, call: Call) -> tuple[Clusters, None]:
        find = self._by_block if call.mask.causal else self._whole
        labels, member_of, clusters = find(q.detach(), k.detach(), call)
        if clusters == 0:  # a causal call of one block: it attends to itself
            return Clusters(labels, labels[..., :0], q[:, :, :0], member_of), None
        rows, of = self._together(q, k), self._together(member_of, k)
        members = call.ops.members(of, clusters, rows)
        means, counts = call.ops.means(rows, of, clusters, members=members)
        return Clusters(labels, counts, means, member_of, members), None

    def _together(self, rows: Tensor, k: Tensor) -> Tensor:
        """Rows (b h n ...) of the heads that share clusters as those of one head, (b hk g*n ...)."""
        (b, h, n), hk = rows.shape[:3], k.shape[1]
        return rows.reshape(b, hk, h // hk * n, *rows.shape[3:]) if self.share_heads else rows

    def _in_one(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Call]:
        """The call with the heads that share clusters as one head: no positions play a part."""
        rows, queries = self._together(q, k), call.mask.queries
        many = q.shape[1] // rows.shape[1]
        if many == 1:
            return q, call
        mask = replace(call.mask, n=rows.shape[2], queries=None if queries is None else queries.repeat(1, many))
        return rows, replace(call, mask=mask)

    def _whole(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, int]:
        shape = q.shape[:3]
        q, call = self._in_one(q, k, call)
        b, h, n, d = q.shape
        valid = None if call.mask.queries is None else call.mask.queries.unsqueeze(1)  # (b 1 n)
        if self.clusters >= n:
            alone = _grouping.ranks(call.mask.query_rows(q).unsqueeze(1)).expand(b, h, n)
            alone = alone.reshape(shape)
            return alone, alone, n
        where = self._space(q, valid, self._form(k, h, call), call)
        points = where.points(q, call)
        labels = call.ops.nearest(points, self._centres(points, valid, where, call))
        if valid is not None:
            labels = torch.where(valid, labels, -1)
            # No more real queries than clusters: each is its own cluster, as it would be without the padding.
            labels = torch.where(valid.sum(-1, keepdim=True) <= self.clusters, _grouping.ranks(valid), labels)
        labels = labels.reshape(shape)
        return labels, labels, self.clusters

    def _form(self, k: Tensor, heads: int, call: Call) -> Tensor | None:
        """The metric: how the keys, or a sample of them, see the distance between queries."""
        if self.metric != "keys":
            return None
        m, keep, at = k.shape[2], call.mask.keys, None
        if self.sample is not None and self.sample < m:
            real = None if keep is None else keep.unsqueeze(1)
            at = draw.positions(real, k, m, call.seed, draw.STREAM_KEYS, self.sample)
        form: Tensor = call.ops.covariance(k, keep, heads, at=at)
        return form

    def _by_block(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, int]:
        """Centroids for every block but the first, numbered block by block."""
        b, h, n, d = q.shape
        blocks = (n + self._block - 1) // self._block
        nobody = torch.full((b, h, n), -1, dtype=torch.int64, device=q.device)
        if blocks <= 1:
            return nobody, nobody, 0
        # Rows by their positions, not by padding and slices: those an exported graph holds to "divides or not".
        at = torch.arange(blocks * self._block, device=q.device)
        row, mine = at.clamp(max=n - 1), torch.arange(n, device=q.device)
        x = q.index_select(2, row).view(b, h, blocks, self._block, d)
        valid = (call.mask.query_rows(q).index_select(1, row) & (at < n)).view(b, 1, blocks, self._block)
        many = h // k.shape[1] if self.share_heads else 1
        if many > 1:  # a block has the queries of all its heads
            x = x.view(b, h // many, many, blocks, self._block, d).transpose(2, 3).flatten(3, 4)
            valid = valid.repeat(1, 1, 1, many)
        past = self.centroids_from == "past"
        source = slice(0, blocks - 1) if past else slice(1, blocks)
        form = None
        if self.metric == "keys":
            absent = max(-call.mask.offset, 0)  # with fewer keys than queries the first positions have no key
            keys, real = F.pad(k, (0, 0, absent, 0)), F.pad(call.mask.key_rows(q), (absent, 0))
            first = call.mask.offset + absent + self._block
            form = _grouping.prefix_covariances(keys, real, h // many, first, self._block, blocks - 1)
        where = self._space(x[:, :, source], valid[:, :, source], form, call)
        points = where.points(x[:, :, source], call)  # as the keys before the block that will listen see them
        centres = self._centres(points, valid[:, :, source], where, call)
        clusters = centres.right.shape[-2]
        shift = (torch.arange(blocks - 1, device=q.device) * clusters).view(-1, 1)

        def numbered(labels: Tensor, real: Tensor, before: int, after: int) -> Tensor:
            labels = torch.where(real, labels + shift, -1)
            labels = labels.view(b, h // many, blocks - 1, many, self._block).transpose(2, 3).flatten(1, 2)
            return F.pad(labels, (0, 0, before, after), value=-1).flatten(2).index_select(2, mine)

        members = call.ops.nearest(points, centres)
        if not past and clusters >= x.shape[3]:
            members = _grouping.ranks(valid[:, :, source]).expand(b, h // many, -1, -1)
        made = numbered(members, valid[:, :, source], 0 if past else 1, 1 if past else 0)
        if not past:
            return made, made, (blocks - 1) * clusters
        answered = call.ops.nearest(where.points(x[:, :, 1:], call), centres)
        return numbered(answered, valid[:, :, 1:], 1, 0), made, (blocks - 1) * clusters

    def _space(self, x: Tensor, valid: Tensor | None, form: Tensor | None, call: Call) -> _grouping.Space:
        d = x.shape[-1]
        centre = _grouping.first_row(x, valid) if self.width(d) < d and self.metric == "keys" else None
        return _grouping.space(self.metric, d, self.bits, self.bias, form, self.rank, centre, call, x.device)

    def _centres(self, points: Tensor, valid: Tensor | None, where: _grouping.Space, call: Call) -> Centres:
        return _grouping.centres(points, valid, self.clusters, self.steps, self.start, self.sample, where, call)

    # ------------------------------------------------------------------ what they answer

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        assert isinstance(groups, Clusters)
        if groups.counts.shape[-1] == 0:
            return own_block(q, k, v, self.block or q.shape[2], call)
        means, clusters, members = groups.means, groups.counts.shape[-1], groups.members
        rows, labels = self._together(q, k), self._together(groups.labels, k)
        if not call.fresh:
            of = self._together(groups.member_of, k)
            members = call.ops.members(of, clusters, rows)
            means, _ = call.ops.means(rows, of, clusters, members=members)
        if call.mask.causal and self.centroids_from == "past":
            members = call.ops.members(labels, clusters, rows)  # those who listen are not those who formed the centroid
        groups = replace(groups, labels=labels, means=means, members=members)
        if not call.mask.causal:
            return _apart(self._answer(rows, k, v, groups, call, (0, 0, 0)), q)
        blocks = (q.shape[2] + self._block - 1) // self._block
        reach = (means.shape[2] // (blocks - 1), call.mask.offset + self._block, self._block)
        before = self._answer(rows, k, v, groups, replace(call, lse=True), reach)
        return merge(own_block(q, k, v, self._block, call), _apart(before, q))

    def _answer(
        self, q: Tensor, k: Tensor, v: Tensor, groups: Clusters, call: Call, reach: tuple[int, int, int]
    ) -> Attended:
        """Everybody hears the centroid; the log-weight, when wanted, is the tangent at the centroid (see Refined)."""
        means, labels = groups.means, groups.labels
        found: Coarse = call.ops.coarse(means, k, v, call.mask, call.scale, top=0, tangent=call.lse, blocks=reach)
        broadcast, level = call.ops.broadcast, found.lse.squeeze(3)
        out = broadcast(found.out.squeeze(3).to(v.dtype), labels, members=groups.members)
        if not call.lse:
            return Attended(out, level.new_empty(()).expand(labels.shape))  # nobody will look
        key = found.mean_key.squeeze(3)
        lse = level - (wide(means) * key).sum(-1) * call.scale
        lse = torch.where(labels < 0, NEVER, broadcast(lse, labels))
        return Attended(out, lse + (wide(q) * broadcast(key, labels)).sum(-1) * call.scale)

    # ------------------------------------------------------------------ what it costs

    def cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        if n < 1 or m < 1:
            return 0
        filled = self.at(n, m, d, e, causal=causal, group=group)
        many = filled._heads_of_a_set(group)
        if causal:
            attending = filled._causal_attending_cost(n, m, d, e, many)
        else:
            attending = filled._attending_cost(n * many, min(filled.clusters, n * many), m, d, e) // many
        return filled.grouping_cost(n, m, d, e, causal=causal, group=group) + attending

    def _heads_of_a_set(self, group: int) -> int:
        """Query heads that share one set of clusters."""
        return group if self.share_heads else 1

    def grouping_cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        """The part of ``cost`` that finds out who is alike, all sizes being given. What is done once for a key head is
        shared by its query heads.

        Args:
            n: queries
            m: keys
            d: dimension of queries and keys
            e: dimension of values
            causal: whether the call is causal
            group: query heads that share a key head
        """
        if causal:
            return self._causal_grouping_cost(n, m, d, group)
        many = self._heads_of_a_set(group)
        if self.clusters >= n * many:
            return 0
        metric = min(self.sample or m, m) * d * d // group if self.metric == "keys" else 0
        return metric + self._kmeans_cost(n * many, d) // many + n * self.clusters * self.width(d) + n * d

    def _kmeans_cost(self, n: int, d: int) -> int:
        """Points, starts and centres, from n queries; assigning them comes after."""
        c, w, keys = self.clusters, self.width(d), self.metric == "keys"
        low = keys and w < d
        train = min(self.sample or n, n)
        total = (self.steps - 1) * train * (c + 1) * w + self._points_cost(n, d)
        if keys:
            total += _grouping.directions_cost(d, w) if low else self.steps * c * d * d
        if self.start == "far":
            pool = min(_grouping.FAR_POOL * c, n)
            total += pool * c * w + (pool * d * d if keys and not low else 0)
        return total

    def _points_cost(self, n: int, d: int) -> int:
        """Queries as k-means sees them: hashed, or along a few directions."""
        w = self.width(d)
        return n * d * w if self.metric == "hamming" or (self.metric == "keys" and w < d) else 0

    def width(self, d: int) -> int:
        """Of the points that k-means sees.

        Args:
            d: dimension of the queries
        """
        if self.metric == "hamming":
            return self.bits
        return d if self.metric == "euclid" or self.rank is None else min(self.rank, d)

    def _attending_cost(self, n: int, c: int, m: int, d: int, e: int) -> int:
        """n queries in c clusters over m keys."""
        return c * m * (d + e)

    def _causal_attending_cost(self, n: int, m: int, d: int, e: int, many: int) -> int:
        """A block attends to itself in full and to all keys before it by centroids; the first one to its whole past."""
        total = min(n, self._block) * max(m - n, 0) * (d + e)
        for start in range(0, n, self._block):
            size, keys = min(self._block, n - start), m - n + start
            total += size * size * (d + e)
            if start and keys > 0:
                clusters = min(self.clusters, self._block * many)
                total += self._attending_cost(size * many, clusters, keys, d, e) // many
        return total

    def _causal_grouping_cost(self, n: int, m: int, d: int, group: int) -> int:
        """The covariance of the keys before a block continues that of the block before: each key enters it once."""
        block, w, past = self._block, self.width(d), self.centroids_from == "past"
        many = self._heads_of_a_set(group)
        c, total = min(self.clusters, block * many), 0
        for start in range(block, n, block):
            size = min(block, n - start)
            if m - n + start < 1:
                continue
            total += self._kmeans_cost((block if past else size) * many, d) // many + size * (c * w + d)
            if past:  # those who formed the centroids are assigned as well as those who listen
                total += block * c * w + self._points_cost(size, d)
        if self.metric == "keys" and n > block:
            total += max(m - n + (n - 1) // block * block, 0) * d * d // group
        return total

    @property
    def _block(self) -> int:
        assert self.block is not None  # filled in by `at`
        return self.block


def own_block(q: Tensor, k: Tensor, v: Tensor, block: int, call: Call) -> Attended:
    """Exact causal attention of each block of positions to its own keys; the first block sees its whole past."""
    b, h, n, _ = q.shape
    blocks = (n + block - 1) // block
    at = torch.arange(blocks * block, device=q.device).view(blocks, block)
    queries = torch.where(at < n, at, -1)
    keys = torch.where((at < n) & (at + call.mask.offset >= 0), at + call.mask.offset, -1)
    mine: Attended = call.ops.bucketed(
        q, k, v, Buckets(queries.expand(b, h, -1, -1), keys.expand(b, h, -1, -1)), call.mask, call.scale
    )
    if call.mask.offset <= 0:
        return mine
    before = torch.arange(call.mask.offset, device=q.device).expand(b, h, 1, -1)
    past = call.ops.bucketed(q, k, v, Buckets(queries[:1].expand(b, h, -1, -1), before), call.mask, call.scale)
    return merge(mine, past)


def _apart(answer: Attended, q: Tensor) -> Attended:
    """What heads that share clusters answered as one, head by head (b h n ...)."""
    return Attended(answer.out.reshape(*q.shape[:3], answer.out.shape[-1]), answer.lse.reshape(q.shape[:3]))
