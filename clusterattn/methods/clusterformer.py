"""ClusterFormer's neural clustering attention (ACL 2022): trained centroids sort the tokens, blocks attend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .._errors import bad_value, check_choice, check_whole
from .._types import Attended, Buckets, Call, Groups, Method
from ..ops import draw, tables
from ..ops._chunks import wide
from .reformer import seated


@dataclass(frozen=True)
class ClusterFormerState:
    """Handed from layer to layer. Only the losses train centroids: the attention depends on them through an argmax."""

    centroids: Tensor  # (b c x) updated by this layer (eq. 3); a layer takes (c x) or (b c x)
    clustering_loss: Tensor | None = None  # L1 (eq. 6): tokens should lie near their centroid
    sorting_loss: Tensor | None = None  # L2 (eq. 11): neighbouring centroids should lie near each other


@dataclass(frozen=True, kw_only=True)
class ClusterFormer(Method):
    """Tokens go to the centroid in which they hold the largest share (eqs. 2-4), are sorted by it (eq. 5), cut into as
    many equal blocks as there are centroids, and attend to their own and the ``blocks - 1`` blocks before (eqs. 8-10).

    ``points=`` (b n x) are the hidden states X W^C that are grouped, once for all heads; the queries when absent.
    Eq. 6 compares X with centroids of X W^C; both losses here use the points. Causal is the paper's masked variant with
    its eqs. 13-14 corrected: positions are compared query against key, and masked logits are -inf rather than 0.
    similarity  "inner" (the paper), or "cosine": bounded losses, for training without a small weight on them
    clusters=None means the square root of the length.
    """

    name: ClassVar[str] = "clusterformer"
    causality: ClassVar[str] = "value"
    self_only: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    groups_type: ClassVar[type | None] = Buckets

    clusters: int | None = None
    blocks: int = 2
    similarity: str = "inner"

    def __post_init__(self) -> None:
        check_whole("ClusterFormer", blocks=self.blocks)
        if self.clusters is not None:
            check_whole("ClusterFormer", clusters=self.clusters)
        check_choice("ClusterFormer", "similarity", self.similarity, ("inner", "cosine"))

    def group(self, q: Tensor, k: Tensor, call: Call) -> tuple[Buckets, ClusterFormerState | None]:
        b, h, n, d = q.shape
        points = wide(call.points if call.points is not None else q.transpose(1, 2).flatten(2))  # (b n x)
        if self.similarity == "cosine":
            points = F.normalize(points, dim=-1)
        valid = seated(q, call)
        real = valid.sum(-1)
        centroids, alive = self._centroids(points, valid, call)
        share = self._log_share(points, centroids, valid)
        labels = share.masked_fill(~alive.unsqueeze(-1), float("-inf")).argmax(1)  # (b n), eq. 4
        order = tables.valid_first(labels, valid).unsqueeze(1)  # eq. 5, stable
        # As many blocks as centroids; where their number follows the length, the real length, never the padding.
        most = self._count(centroids.shape[1] if call.state is not None else None, n)
        seats = -(-n // most)
        blocks = torch.full_like(real, most)
        if self.clusters is None and call.state is None:
            seats, blocks = most, alive.sum(-1).clamp(min=1)
        size = -(-real // blocks)
        start = (torch.arange(most, device=q.device) * size.unsqueeze(-1)).unsqueeze(1)
        stop = torch.minimum(start + size.view(-1, 1, 1), real.view(-1, 1, 1))
        table = tables.cut(order, start, stop, seats)
        keys = tables.look_back(table, -(-real // size.clamp(min=1)), self.blocks)
        buckets = Buckets(table.expand(-1, h, -1, -1), keys.expand(-1, h, -1, -1))
        return buckets, self._state(points, share, labels, valid, alive) if call.keep_state else None

    def _count(self, known: int | None, n: int) -> int:
        return self.clusters or known or max(_root(n), 1)

    def _log_share(self, points: Tensor, centroids: Tensor, valid: Tensor) -> Tensor:
        """log U (eq. 2): the similarity of each centroid with each token, normalised over the tokens. (b c n)"""
        alike = centroids @ points.mT
        alike = alike.masked_fill(
            ~valid.unsqueeze(1), torch.finfo(alike.dtype).min / 4
        )  # finite: an empty row keeps its gradient
        return alike - alike.logsumexp(-1, keepdim=True)

    def _centroids(self, points: Tensor, valid: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """(b c x) from the state, or some of the points themselves; and which of them are alive (b c)."""
        if call.state is None:
            most = min(self._count(None, points.shape[1]), points.shape[1])
            wanted = None if self.clusters else valid.sum(-1, keepdim=True).double().sqrt().ceil().long()
            lots = draw.stratified_among(valid, call.seed, draw.STREAM_STARTS, most, wanted)
            alive = lots >= 0
            return points.gather(1, lots.clamp(min=0).unsqueeze(-1).expand(-1, -1, points.shape[-1])), alive
        given = call.state.centroids if isinstance(call.state, ClusterFormerState) else call.state
        if not isinstance(given, Tensor) or given.dim() not in (2, 3) or given.shape[-1] != points.shape[-1]:
            got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise bad_value(
                f"centroids (c {points.shape[-1]}) or (b c {points.shape[-1]})", got, "the state of the layer before"
            )
        given = given.to(points.dtype).expand(points.shape[0], -1, -1)
        given = F.normalize(given, dim=-1) if self.similarity == "cosine" else given
        return given, torch.ones(given.shape[:2], dtype=torch.bool, device=points.device)

    def _state(self, points: Tensor, share: Tensor, labels: Tensor, valid: Tensor, alive: Tensor) -> ClusterFormerState:
        new = (share.exp() * valid.unsqueeze(1) * alive.unsqueeze(-1)) @ points  # eq. 3
        if self.similarity == "cosine":
            new = F.normalize(new, dim=-1)
        mine = new.gather(1, labels.unsqueeze(-1).expand_as(points))
        close = ((points * mine).sum(-1) * valid).sum(-1) / valid.sum(-1).clamp(min=1)
        beside = (new * new.roll(1, 1)).sum(-1).mean(-1)
        share_of_batch = 1 / max(points.shape[0], 1)  # an empty batch loses nothing
        return ClusterFormerState(new, -close.sum() * share_of_batch, -beside.sum() * share_of_batch)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        assert isinstance(groups, Buckets)
        return call.ops.bucketed(q, k, v, groups, call.mask, call.scale)

    def cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        c = self.clusters or _root(n)
        return 2 * n * c * d + n * min(self.blocks * -(-n // c), n) * (d + e)


def _root(n: int) -> int:
    """The square root, rounded up."""
    root: int = math.ceil(torch.sym_sqrt(n))
    return root
