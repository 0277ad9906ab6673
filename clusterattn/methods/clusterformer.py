"""ClusterFormer's neural clustering attention (ACL 2022): trained centroids sort the tokens, blocks attend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._errors import bad_value, check_choice, check_whole
from .._types import Attended, Buckets, Call, Groups, Method
from ..ops import draw, tables
from ..ops._chunks import wide
from .reformer import seated

SMALL = 1e-12  # added to lengths that something is divided by


@dataclass(frozen=True)
class ClusterFormerState:
    """Handed from layer to layer. A loss is None where its weight is 0, or where nobody records gradients.

    Attributes:
        centroids: (b c x) updated by this layer (eq. 3); a layer takes (c x) or (b c x)
        clustering_loss: L1 (eq. 6): tokens should lie near their centroid
        sorting_loss: L2 (eq. 11): neighbouring centroids should lie near each other
        balance_loss: how uneven the clusters are, from 0 to log c
        labels: (b g n) the cluster of each token, -1 for padding; g is h, or 1 where heads share
    """

    centroids: Tensor
    clustering_loss: Tensor | None = None
    sorting_loss: Tensor | None = None
    balance_loss: Tensor | None = None
    labels: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterFormer(Method):
    """Tokens go to the centroid in which they hold the largest share (eqs. 2-4), are sorted by it (eq. 5), cut into as
    many equal blocks as there are centroids, and attend to their own and the ``blocks - 1`` blocks before (eqs. 8-10).

    ``points=`` (b n x) are the hidden states X W^C that are grouped; the queries of all heads when absent. Causal is
    the paper's masked variant with its eqs. 13-14 corrected: positions are compared query against key, and masked
    logits are -inf rather than 0. What the paper leaves open, with what was measured: docs/methods.md.

    Args:
        clusters: None means the square root of the length
        blocks: a block attends to itself and so many blocks less one before it
        scope: "head": points and centroids are cut into heads, each with a grouping of its own. "shared": one for all
        similarity: "cosine", or "inner" as printed: its losses have no lower bound
        sharpness: factor of the similarity inside U (eq. 2)
        assign: by the largest "share" (eq. 4), or to the centroid of largest "similarity"
        ties: in which order the tokens of one cluster stand, of which the paper says nothing: "forward", by their place
            in the sequence; or clusters take "turns", every other one the other way. Blocks look back alone: where a
            cluster is cut, one order hides what comes later in the sequence, the other what came before
        compare: losses compare with "updated" centroids (eqs. 6, 11) or the "given" ones
        spread: give the points mean 0 and variance 1 over the tokens, so that they cannot all become one
        trains: what the losses train: the "centroids" alone, the "map" W^C too (in the modules, which own it: there no
            gradient of the grouping reaches the tokens), or "all" of the model. Losses that reach the points make them
            one
        affinity: a signal from the task, not in the paper: a token's shares U, made to sum to 1 over the centroids, are
            its memberships A; logits get affinity · A_i · A_j added, through which the task trains the grouping. For
            encoders: causal calls too make memberships from the whole sequence, and the task learns to read ahead in
            them. Every cluster is one more feature of queries and keys: kernels hold 256 of both together, and beyond
            that the reference answers
        straight: another: answers are multiplied by 1, whose gradient is that of the token's largest membership
        mu: weight of the clustering loss L1 in the joint loss of the modules (eq. 17); with 0 it is not computed
        nu: weight of the sorting loss L2 there
        balance: weight of how uneven the clusters' soft sizes are, which is not in the paper
        fade: updates over which the modules let these weights fall to 0; with 0 they stay
        pass_on: the modules give a layer the centroids that the one before it updated; or each layer trains its own
    """

    name: ClassVar[str] = "clusterformer"
    causality: ClassVar[str] = "value"
    self_only: ClassVar[bool] = True
    takes_points: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    groups_type: ClassVar[type | None] = Buckets

    clusters: int | None = None
    blocks: int = 2
    scope: str = "head"
    similarity: str = "cosine"
    sharpness: float = 1.0
    assign: str = "share"
    ties: str = "forward"
    compare: str = "updated"
    spread: bool = False
    trains: str = "centroids"
    affinity: float = 0.0
    straight: bool = False
    mu: float = 0.1
    nu: float = 0.1
    balance: float = 0.0
    fade: int = 0
    pass_on: bool = True

    def __post_init__(self) -> None:
        check_whole("ClusterFormer", blocks=self.blocks)
        if self.clusters is not None:
            check_whole("ClusterFormer", clusters=self.clusters)
        for name, words in CHOICES.items():
            check_choice("ClusterFormer", name, getattr(self, name), words)
        if not isinstance(self.fade, int) or self.fade < 0:
            raise bad_value("ClusterFormer(fade a whole number of updates, or 0)", self.fade, "fade=0")
        if not self.sharpness > 0:
            raise bad_value("ClusterFormer(sharpness above 0)", self.sharpness, "sharpness=1.0")
        if min(self.mu, self.nu, self.balance, self.affinity) < 0:
            got = f"mu={self.mu}, nu={self.nu}, balance={self.balance}, affinity={self.affinity}"
            raise bad_value("weights mu, nu, balance and affinity of at least 0", got, "0 or more")

    @property
    def learns(self) -> bool:
        """Does anything train the grouping? Else its gradients are not recorded."""
        return bool(self.mu or self.nu or self.balance or self.affinity or self.straight)

    def through_state(self) -> list[str]:
        """Settings of the losses, and of the centroids that are trained. A weight of 0 asks for nothing."""
        changed = [name for name in OF_STATE if getattr(self, name) != getattr(ClusterFormer, name)]
        return [f"{name}={getattr(self, name)!r}" for name in changed if getattr(self, name) or name == "pass_on"]

    def group(self, q: Tensor, k: Tensor, call: Call) -> tuple[Buckets, ClusterFormerState | None]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns and call.keep_state):
            return self._group(q, call)

    def _group(self, q: Tensor, call: Call) -> tuple[Buckets, ClusterFormerState | None]:
        b, h, n, _ = q.shape
        valid = seated(q, call)
        real = valid.sum(-1)
        points = self._points(q, call, valid).contiguous()  # heads apart: else every product below copies them
        if self.trains == "centroids":
            points = points.detach()
        centroids, alive = self._centroids(points, valid, call)
        recorded = torch.is_grad_enabled() and (points.requires_grad or self.balance > 0)
        with torch.set_grad_enabled(recorded):  # else ``_Updated`` needs no record of it
            alike, lengths = self._alike(points, centroids, None if _full(call) else valid)
        labels = self._labels(alike, None if call.state is not None else alive)  # (b g n), eq. 4
        order = tables.valid_first(self._ranked(labels), valid.unsqueeze(1))  # eq. 5, stable
        # As many blocks as centroids; where their number follows the length, the real length, never the padding.
        most = self._count(centroids.shape[2] if call.state is not None else None, n)
        seats = -(-n // most)
        blocks = torch.full_like(real, most)
        if self.clusters is None and call.state is None:
            seats, blocks = most, alive.sum(-1).clamp(min=1)
        size = -(-real // blocks)
        start = (torch.arange(most, device=q.device) * size.unsqueeze(-1)).unsqueeze(1)
        stop = torch.minimum(start + size.view(-1, 1, 1), real.view(-1, 1, 1))
        table = tables.cut(order, start, stop, seats)
        keys = tables.look_back(table, -(-real // size.clamp(min=1)), self.blocks)
        buckets = Buckets(table.expand(b, h, -1, -1), keys.expand(b, h, -1, -1))
        if not call.keep_state:
            return buckets, None
        counted = None if _full(call) and call.state is not None else valid[:, None, None] & alive[:, None, :, None]
        return buckets, self._state(points, lengths, centroids, alike, labels, valid, alive, counted)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        assert isinstance(groups, Buckets)
        member = self._membership(q, call) if self.affinity or self.straight else None  # (b g c n)
        if member is not None and self.affinity:  # as so many more features of queries and keys: no verb knows of it
            if k.shape[1] != q.shape[1]:
                k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
            more = member.mT.to(q.dtype).expand(*q.shape[:3], -1)
            q, k = torch.cat([q, more * (self.affinity / call.scale)], -1), torch.cat([k, more], -1)
        answer: Attended = call.ops.bucketed(q, k, v, groups, call.mask, call.scale)
        if member is not None and self.straight:
            best = member.amax(2).unsqueeze(-1)
            answer = Attended(answer.out * (1 + best - best.detach()).to(answer.out.dtype), answer.lse)
        return answer

    def cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        c = self.clusters or _root(n)
        signal = bool(self.affinity or self.straight)  # memberships are made once more, with a record of it
        shown = d + c if self.affinity else d
        return (2 + signal) * n * c * d + n * min(self.blocks * -(-n // c), n) * (shown + e)

    # ------------------------------------------------------------------ who belongs where

    def _count(self, known: int | None, n: int) -> int:
        return self.clusters or known or max(_root(n), 1)

    def _points(self, q: Tensor, call: Call, valid: Tensor) -> Tensor:
        """(b g n y): what is grouped, padding zero. g groupings: as many as heads, or one with all y = x features."""
        b, h, n, _ = q.shape
        if call.points is None:
            points = q if self.scope == "head" else q.transpose(1, 2).flatten(2).unsqueeze(1)
        else:
            points, g = call.points, h if self.scope == "head" else 1
            if points.shape[-1] % g:
                wanted = f"points (b n x) whose x is cut into {g} heads"
                raise bad_value(wanted, tuple(points.shape), 'scope="shared", or another x')
            points = cut(points, g)
            if not _full(call):
                points = torch.where(valid[:, None, :, None], points, 0.0)
        return spread_out(points, None if _full(call) else valid) if self.spread else points

    def _centroids(self, points: Tensor, valid: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """(b g c y) from the state, or some of the points themselves; and which of them are alive (b c)."""
        b, g, n, y = points.shape
        if call.state is None:
            most = min(self._count(None, n), n)
            wanted = None if self.clusters else valid.sum(-1, keepdim=True).double().sqrt().ceil().long()
            drawn = draw.stratified_among(valid, call.seed, draw.STREAM_STARTS, most, wanted)
            rows = drawn.clamp(min=0)[:, None, :, None].expand(b, g, most, y)
            return self.unit(wide(points.gather(2, rows))), drawn >= 0
        given = call.state.centroids if isinstance(call.state, ClusterFormerState) else call.state
        if not isinstance(given, Tensor) or given.dim() not in (2, 3) or given.shape[-1] != g * y:
            got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise bad_value(f"centroids (c {g * y}) or (b c {g * y})", got, "the state of the layer before")
        given = wide(given).to(wide(points).dtype).expand(b, -1, -1)
        alive = torch.ones(given.shape[:2], dtype=torch.bool, device=points.device)
        return self.unit(cut(given, g)), alive

    def unit(self, x: Tensor) -> Tensor:
        """Of length 1 where φ is the cosine.

        Args:
            x: centroids (… y)
        """
        return torch.nn.functional.normalize(x, dim=-1) if self.similarity == "cosine" else x

    def _alike(self, points: Tensor, centroids: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """φ(C, P) · sharpness (b g c n), in fp32 or better, and 1/|P| (b g 1 n) where φ is the cosine.

        Points stay as they came, in their dtype: no second tensor of their size is made, or kept for the backward."""
        alike = wide(centroids.to(points.dtype) @ points.mT)
        lengths = None
        if self.similarity == "cosine":
            norms = torch.linalg.vector_norm(points, dim=-1, dtype=alike.dtype)
            lengths = norms.clamp(min=SMALL).reciprocal().unsqueeze(2)
            alike = alike * lengths
        if self.sharpness != 1:
            alike = alike * self.sharpness
        if valid is not None:  # finite: an empty row keeps its gradient
            alike = alike.masked_fill(~valid[:, None, None], torch.finfo(alike.dtype).min / 4)
        return alike, lengths

    def _labels(self, alike: Tensor, alive: Tensor | None) -> Tensor:
        alike = alike.detach()
        if self.assign == "share":  # log U (eq. 2): normalised over the tokens, for each centroid
            alike = alike - alike.logsumexp(-1, keepdim=True)
        return (alike if alive is None else alike.masked_fill(~alive[:, None, :, None], float("-inf"))).argmax(2)

    def clusters_of(self, points: Tensor, centroids: Tensor, valid: Tensor) -> Tensor:
        """The cluster of every token (b g n), by eqs. 2 and 4 alone; padding has any.

        Args:
            points: as they are compared (b g n y)
            centroids: (b g c y)
            valid: bool (b n), True = a real token
        """
        alike, _ = self._alike(points, self.unit(centroids), valid)
        return self._labels(alike, None)

    def _ranked(self, labels: Tensor) -> Tensor:
        """What tokens are sorted by (b g n): their clusters, and among equals their place in the sequence, which every
        other cluster reads backwards where they take turns."""
        if self.ties == "forward":
            return labels
        place = torch.arange(labels.shape[2], device=labels.device)
        return labels * labels.shape[2] + torch.where(labels % 2 == 1, place.flip(0), place)

    def _membership(self, q: Tensor, call: Call) -> Tensor:
        """A (b g c n): the shares U of a token, normalised over the centroids."""
        valid = seated(q, call)
        points = self._points(q, call, valid)
        centroids, alive = self._centroids(points, valid, call)
        alike, _ = self._alike(points, centroids, None if _full(call) else valid)
        if self.assign == "share":
            alike = alike - alike.logsumexp(-1, keepdim=True)
        return alike.masked_fill(~alive[:, None, :, None], torch.finfo(alike.dtype).min).softmax(2)

    # ------------------------------------------------------------------ what is learned

    def _state(
        self, points: Tensor, lengths: Tensor | None, centroids: Tensor, alike: Tensor, labels: Tensor, valid: Tensor,
        alive: Tensor, counted: Tensor | None,
    ) -> ClusterFormerState:  # fmt: skip
        b, g, c, _ = centroids.shape
        if alike.requires_grad or not centroids.requires_grad:
            updated = summed(share_of(alike, counted, lengths), points)
        else:
            updated = _Updated.apply(centroids, alike, self.sharpness, counted, lengths, points)  # type: ignore[no-untyped-call]
        new = self.unit(updated)  # eq. 3
        marked = labels.masked_fill(~valid.unsqueeze(1), -1)
        kept = new.transpose(1, 2).flatten(2)
        if not torch.is_grad_enabled():
            return ClusterFormerState(kept, labels=marked)
        clustering = sorting = uneven = None
        compared = new if self.compare == "updated" else centroids
        of_batch = 1 / max(b * g, 1)  # an empty batch loses nothing
        real = valid.sum(-1).clamp(min=1).unsqueeze(1)
        if self.mu:  # Σ_j φ(P_j, Ĉ of j's cluster) = Σ_c φ(Ĉ_c, Σ of its members): nothing as large as P
            members = marked.unsqueeze(2) == torch.arange(c, device=labels.device).view(-1, 1)
            each = alike.new_ones(()) if lengths is None else lengths
            within = summed(torch.where(members, each.to(points.dtype), 0.0), points)
            close = (compared * within).sum((-1, -2)) / real
            clustering = -close.sum() * of_batch
        if self.nu:
            beside = (compared * compared.roll(1, 2)).sum(-1).mean(-1)
            sorting = -beside.sum() * of_batch
        if self.balance:
            log_share = alike if self.assign == "similarity" else alike - alike.logsumexp(-1, keepdim=True)
            belongs = log_share.masked_fill(~alive[:, None, :, None], torch.finfo(alike.dtype).min).softmax(2)
            sizes = (belongs * valid[:, None, None]).sum(-1) / real.unsqueeze(-1)
            many = alive.sum(-1).clamp(min=1).log().to(sizes.dtype).unsqueeze(1)
            uneven = (many + (sizes * sizes.clamp(min=SMALL).log()).sum(-1)) * valid.any(-1, keepdim=True)
            uneven = uneven.sum() * of_batch
        return ClusterFormerState(kept, clustering, sorting, uneven, marked)


OF_STATE = ("compare", "trains", "mu", "nu", "balance", "fade", "pass_on")
CHOICES = {
    "scope": ("head", "shared"), "similarity": ("cosine", "inner"), "assign": ("share", "similarity"),
    "compare": ("updated", "given"), "trains": ("centroids", "map", "all"), "ties": ("forward", "turns"),
}  # fmt: skip


def share_of(alike: Tensor, counted: Tensor | None, lengths: Tensor | None) -> Tensor:
    """U (eq. 2), 0 for padding and for centroids that are not alive; times ``lengths``, where they are given."""
    share = alike.softmax(-1)
    for factor in (counted, lengths):
        if factor is not None:  # without a record of it, in place: shares are as large as the points
            share = share * factor if share.requires_grad else share.mul_(factor)
    return share


def summed(weights: Tensor, points: Tensor) -> Tensor:
    """Σ_j weights_cj P_j (b g c y)."""
    return wide(weights.to(points.dtype) @ points)


class _Updated(torch.autograd.Function):
    """U P of eq. 3 where the centroids alone are trained: what the backward needs of U (b g c n) is made anew there, so
    that nothing larger than the points is kept."""

    @staticmethod
    def forward(
        ctx: Any, centroids: Tensor, alike: Tensor, sharpness: float, counted: Tensor | None, lengths: Tensor | None,
        points: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(centroids, counted, lengths, points)
        ctx.sharpness = sharpness
        return summed(share_of(alike, counted, lengths), points)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        centroids, counted, lengths, points = ctx.saved_tensors
        factor = ctx.sharpness if lengths is None else lengths * ctx.sharpness
        alike = wide(centroids.to(points.dtype) @ points.mT) * factor
        if counted is not None:
            alike = alike.masked_fill(~counted.any(2, keepdim=True), torch.finfo(alike.dtype).min / 4)
        share = alike.softmax(-1)
        del alike  # as large as the points, like every step below: one name, so that each is let go of
        x = wide(grad.to(points.dtype) @ points.mT)
        x = x if lengths is None else x * lengths
        x = x if counted is None else x * counted
        x = x - (x * share).sum(-1, keepdim=True)
        x = x * share
        x = (x * factor).to(points.dtype)
        return (x @ points).to(centroids.dtype), None, None, None, None, None


def _full(call: Call) -> bool:
    """No padding anywhere."""
    return call.mask.queries is None and call.mask.keys is None


def cut(x: Tensor, parts: int) -> Tensor:
    """(b n parts·y) -> (b parts n y)"""
    b, n, width = x.shape
    return x.reshape(b, n, parts, width // parts).transpose(1, 2)


def spread_out(points: Tensor, valid: Tensor | None) -> Tensor:
    """Mean 0 and variance 1 of every feature over the real tokens of a sequence; padding is zero, and stays it.

    Widened once: one such tensor is kept for the backward, and gradients meet before they are rounded."""
    x, real = wide(points), None if valid is None else valid[:, None, :, None]
    count = max(x.shape[2], 1) if real is None else real.sum(2, keepdim=True).clamp(min=1)
    x = x - x.sum(2, keepdim=True) / count
    x = x if real is None else x * real
    variance: Tensor = torch.linalg.vector_norm(x, dim=2, keepdim=True).square() / count
    return (x * (variance + 1e-5).rsqrt()).to(points.dtype)


def _root(n: int) -> int:
    """The square root, rounded up."""
    root: int = math.ceil(torch.sym_sqrt(n))
    return root
