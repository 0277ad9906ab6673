"""Routing attention (Roy et al. 2021): k-means centroids pick the queries and keys that are nearest to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .._errors import bad_value, check_whole
from .._types import Attended, Buckets, Call, Groups, Method
from ..ops import draw, tables
from ..ops._chunks import wide

FIRST_STEPS = 5  # k-means steps where a call starts from its own data
TILES = 32, 128  # queries of one centroid that attend together: the fewest and the most


@dataclass(frozen=True)
class RoutingState:
    """What Routing learns between calls, shared by the batch.

    Attributes:
        means: (h c d)
        commitment: how far this call's tokens lie from their centroids: an auxiliary loss, with gradient
    """

    means: Tensor
    commitment: Tensor


@dataclass(frozen=True, kw_only=True)
class Routing(Method):
    """Each centroid takes its ``window`` nearest queries and keys; a token may be taken by several centroids or none.

    A query taken by none goes to its nearest centroid all the same, and one that finds no key there (causal) to itself.
    Tokens are compared on the unit sphere. Without ``state`` the centroids come from each sequence's own tokens; with
    ``return_state=True`` they start from the whole batch and move by an exponential average (``decay``).
    clusters=None means n / window, as published.

    Args:
        clusters: how many centroids; None: the length divided by the window
        window: queries, and keys, that a centroid takes
        decay: of the slow average by which centroids move, with a state
    """

    name: ClassVar[str] = "routing"
    causality: ClassVar[str] = "value"
    stateful: ClassVar[bool] = True
    groups_type: ClassVar[type | None] = Buckets

    clusters: int | None = None
    window: int = 64
    decay: float = 0.999

    def __post_init__(self) -> None:
        check_whole("Routing", window=self.window)
        if self.clusters is not None:
            check_whole("Routing", clusters=self.clusters)
        if not 0.0 <= self.decay <= 1.0:
            raise bad_value("Routing(decay between 0 and 1)", self.decay, "decay=0.999")

    def group(self, q: Tensor, k: Tensor, call: Call) -> tuple[Buckets, RoutingState | None]:
        b, h, n, _ = q.shape
        tokens = torch.cat([q, k.repeat_interleave(h // k.shape[1], 1)], 2)
        both = call.ops.unit(tokens.detach())  # a verb: a compiled call rounds as an eager one, and chooses the same
        valid_q, valid_k = call.mask.query_rows(q), call.mask.key_rows(q)
        valid = torch.cat([valid_q, valid_k], 1).unsqueeze(1)
        if call.state is not None:
            means = self._known(call.state, q).expand(b, -1, -1, -1)
            alive = means.abs().sum(-1) > 0
        elif call.keep_state:  # one set of centroids for the batch: its tokens are laid end to end
            means, alive = self._start(
                both.transpose(0, 1).flatten(1, 2).unsqueeze(0), valid.reshape(1, 1, -1), n, call
            )
            means, alive = means.expand(b, -1, -1, -1), alive.expand(b, -1, -1)
        else:
            means, alive = self._start(both, valid, n, call)
        seats_q = self._nearest(both[:, :, :n], call.mask.queries, means, alive, call)
        seats_k = self._nearest(both[:, :, n:], call.mask.keys, means, alive, call)
        labels = call.ops.assign(both if call.keep_state else both[:, :, :n], means, alive)
        buckets = self._with_leftovers(labels[..., :n], seats_q, seats_k, valid_q, means.shape[2])
        if not call.keep_state:
            return buckets, None
        return buckets, self._learn(F.normalize(wide(tokens), dim=-1), labels, valid, means, call)

    def _known(self, state: object, q: Tensor) -> Tensor:
        if not isinstance(state, RoutingState) or state.means.shape[0::2] != (q.shape[1], q.shape[3]):
            got = tuple(state.means.shape) if isinstance(state, RoutingState) else type(state).__name__
            raise bad_value(
                f"a RoutingState with means ({q.shape[1]} c {q.shape[3]})", got, "state=None to start from the data"
            )
        return state.means.to(wide(q).dtype).unsqueeze(0)

    def _start(self, tokens: Tensor, valid: Tensor, n: int, call: Call) -> tuple[Tensor, Tensor]:
        """Centroids (b h c d) of the tokens themselves. With padding fewer are alive: as many as without it."""
        most = self.clusters or -(-n // self.window)
        wanted = None
        if self.clusters is None and not call.keep_state:
            wanted = -(-call.mask.query_rows(tokens).sum(-1).view(-1, 1, 1) // self.window)
        lots = draw.stratified_among(
            valid, call.seed, draw.STREAM_STARTS, min(most, tokens.shape[2]), wanted
        )  # (b 1 c)
        alive = lots >= 0
        at = lots.clamp(min=0).unsqueeze(-1).expand(*tokens.shape[:2], -1, tokens.shape[-1])
        starts = wide(tokens.gather(2, at)) * alive.unsqueeze(-1)  # a centroid that never was is 0
        return call.ops.lloyd(tokens, valid, starts, alive, updates=FIRST_STEPS), alive

    def _nearest(self, points: Tensor, valid: Tensor | None, means: Tensor, alive: Tensor, call: Call) -> Tensor:
        """The ``window`` valid points nearest to each living centroid: (b h c w)."""
        near = call.ops.closest(means, points, valid, min(self.window, points.shape[2]))
        return torch.where(alive.unsqueeze(-1), near, -1)

    def _with_leftovers(self, home: Tensor, seats_q: Tensor, seats_k: Tensor, valid: Tensor, c: int) -> Buckets:
        """Queries that no centroid took sit with the keys of the nearest one, their home, in tiles of their own."""
        b, h, n = home.shape
        taken = torch.zeros(b, h, n + 1, dtype=torch.bool, device=home.device)
        taken = taken.scatter(2, torch.where(seats_q < 0, n, seats_q).flatten(2), True)[..., :n]
        home = torch.where(taken | ~valid.unsqueeze(1), -1, home)
        # half a window: some third of the queries is left over, and gradients of keys are kept for every tile
        tile = min(max(1 << (max(self.window // 2, 1).bit_length() - 1), TILES[0]), TILES[1])
        table, first = tables.tiles(home, c, tile)
        cluster, z = tables.family_of(first, table.shape[2]), seats_k.shape[-1]
        keys = seats_k.gather(2, cluster.unsqueeze(-1).expand(-1, -1, -1, z))
        # both kinds of bucket in one table: taken queries are cut into tiles of the same height
        rows = -(-seats_q.shape[-1] // tile)
        seats_q = F.pad(seats_q, (0, rows * tile - seats_q.shape[-1]), value=-1).view(b, h, c * rows, tile)
        return Buckets(
            torch.cat([seats_q, table], 2), torch.cat([seats_k.repeat_interleave(rows, 2), keys], 2), rounds=0
        )

    def _learn(self, tokens: Tensor, labels: Tensor, valid: Tensor, means: Tensor, call: Call) -> RoutingState:
        """The exponential average of each centroid over the tokens nearest to it, over the whole batch."""
        c, member_of, still = means.shape[2], torch.where(valid, labels, -1), tokens.detach()
        of_each, counts = call.ops.means(still, member_of, c, members=call.ops.members(member_of, c, still))
        sums, total = (of_each * counts.unsqueeze(-1)).sum(0), counts.sum(0).unsqueeze(-1)
        old = means[0].detach()
        seen = F.normalize(sums, dim=-1)
        new = torch.where(total > 0, old * self.decay + seen * (1 - self.decay), old)
        mine = call.ops.broadcast(means.detach(), member_of)
        apart = (tokens - mine).square().mean(-1) * valid
        return RoutingState(new, apart.sum() / (valid.sum() * tokens.shape[1]).clamp(min=1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        assert isinstance(groups, Buckets)
        answer: Attended = call.ops.bucketed(q, k, v, groups, call.mask, call.scale)
        if call.mask.causal:
            answer = call.ops.itself_at_least(answer, q, k, v, call.mask, call.scale)
        return answer

    def cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        c, w = self.clusters or -(-n // self.window), min(self.window, m)
        grouping = (FIRST_STEPS + 1) * (n + m) * c * d + n * c * d  # once more: where queries go that no window took
        return grouping + (c * min(self.window, n) + n) * w * (d + e)
