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
from ..ops._jit import HEAD_DIMS
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


@dataclass(frozen=True)
class SignalBuckets(Buckets):
    """Made in the call that they serve: with the memberships (b g c n) that its logits are to know."""

    member: Tensor | None = None


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
        signal = bool(self.affinity or self.straight) and call.soon and call.state is not None
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns and (call.keep_state or signal)):
            return self._group(q, call, signal)

    def _group(self, q: Tensor, call: Call, signal: bool) -> tuple[Buckets, ClusterFormerState | None]:
        b, h, n, _ = q.shape
        valid = seated(q, call)
        points = self._points(q, call, valid).contiguous()  # heads apart: else every product below copies them
        seen = points.detach() if self.trains == "centroids" else points
        centroids, alive = self._centroids(seen, valid, call)
        recorded = torch.is_grad_enabled()
        with torch.set_grad_enabled(recorded and seen.requires_grad):  # else gradients are written out, see below
            lengths = self._lengths(seen, valid)
            alike = self._alike(seen, centroids, lengths, valid)
            shares = self._shares(alike)
        alike = alike if alike.requires_grad else shares  # U is the softmax of either: one is enough
        labels = self._labels(shares, alive)  # (b g n), eq. 4
        # As many blocks as centroids; where their number follows the length, the real length, never the padding.
        most = self._count(centroids.shape[2] if call.state is not None else None, n)
        many = None if alive is None or self.clusters else alive.sum(-1)
        ranks = tables.ranked(labels, most, self.ties == "turns")
        table, keys = tables.blocks(ranks, valid, most, many, self.blocks)  # eqs. 5 and 8
        table, keys = table.expand(b, h, -1, -1), keys.expand(b, h, -1, -1)
        member = None
        if signal and not alike.requires_grad:
            member = _Memberships.apply(points, centroids, shares, lengths, alive, self)  # type: ignore[no-untyped-call]
        elif signal or (self.balance and recorded and call.keep_state):
            member = memberships(shares, alive)
        del shares  # as large as the points
        buckets = SignalBuckets(table, keys, member=member) if signal else Buckets(table, keys)
        if not call.keep_state:
            return buckets, None
        return buckets, self._state(seen, lengths, centroids, alike, member, labels, valid, alive, call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        assert isinstance(groups, Buckets)
        member = None  # (b g c n)
        if self.affinity or self.straight:
            member = groups.member if isinstance(groups, SignalBuckets) and call.fresh else self._membership(q, call)
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
        signal = bool(self.affinity or self.straight)  # memberships, where they come without the groups
        shown = d + c if self.affinity else d
        return (2 + signal) * n * c * d + n * min(self.blocks * -(-n // c), n) * (shown + e)

    # ------------------------------------------------------------------ who belongs where

    def _count(self, known: int | None, n: int) -> int:
        return self.clusters or known or max(_root(n), 1)

    def _points(self, q: Tensor, call: Call, valid: Tensor | None) -> Tensor:
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
            if valid is not None:
                points = torch.where(valid[:, None, :, None], points, 0.0)
        return spread_out(points, valid) if self.spread else points

    def _centroids(self, points: Tensor, valid: Tensor | None, call: Call) -> tuple[Tensor, Tensor | None]:
        """(b g c y) from the state, or some of the points themselves; and which of them are alive (b c), None: all."""
        b, g, n, y = points.shape
        if call.state is None:
            most = min(self._count(None, n), n)
            among = points.new_ones((b, n), dtype=torch.bool) if valid is None else valid
            wanted = None if self.clusters else among.sum(-1, keepdim=True).double().sqrt().ceil().long()
            drawn = draw.stratified_among(among, call.seed, draw.STREAM_STARTS, most, wanted)
            rows = drawn.clamp(min=0)[:, None, :, None].expand(b, g, most, y)
            return self._unit(wide(points.gather(2, rows)), call), None if valid is None else drawn >= 0
        given = call.state.centroids if isinstance(call.state, ClusterFormerState) else call.state
        if not isinstance(given, Tensor) or given.dim() not in (2, 3) or given.shape[-1] != g * y:
            got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise bad_value(f"centroids (c {g * y}) or (b c {g * y})", got, "the state of the layer before")
        given = wide(given).to(torch.promote_types(points.dtype, torch.float32)).expand(b, -1, -1)
        return self._unit(cut(given, g), call), None

    def unit(self, x: Tensor) -> Tensor:
        """Of length 1 where φ is the cosine.

        Args:
            x: centroids (… y)
        """
        return torch.nn.functional.normalize(x, dim=-1) if self.similarity == "cosine" else x

    def _unit(self, x: Tensor, call: Call) -> Tensor:
        """The same by the verbs of a call, as far as they reach."""
        return call.ops.unit(x) if self.similarity == "cosine" and x.shape[-1] <= HEAD_DIMS else self.unit(x)

    def _lengths(self, points: Tensor, valid: Tensor | None) -> Tensor | None:
        """What the point of a token is multiplied with (b g 1 n): 1/|P| where φ is the cosine, 0 for padding."""
        dtype = torch.promote_types(points.dtype, torch.float32)
        kept = None if valid is None else valid[:, None, None].to(dtype)
        if self.similarity != "cosine":
            return kept
        norms = torch.linalg.vector_norm(points, dim=-1, dtype=dtype)
        lengths: Tensor = norms.clamp(min=SMALL).reciprocal().unsqueeze(2)
        return lengths if kept is None else lengths * kept

    def _alike(self, points: Tensor, centroids: Tensor, lengths: Tensor | None, valid: Tensor | None) -> Tensor:
        """φ(C, P) · sharpness (b g c n), in fp32 or better. Points stay as they came, in their dtype: no second tensor
        of their size is made, or kept for the backward."""
        alike = centroids.to(points.dtype) @ points.mT
        alike = (wide(alike) if lengths is None else alike) * self._factor(lengths)
        # finite: an empty row keeps its gradient
        return alike if valid is None else alike.masked_fill(~valid[:, None, None], torch.finfo(alike.dtype).min / 4)

    def _factor(self, lengths: Tensor | None) -> Tensor | float:
        return self.sharpness if lengths is None else lengths * self.sharpness

    def _shares(self, alike: Tensor) -> Tensor:
        """What assigns (b g c n): log U (eq. 2), normalised over the tokens for each centroid; or similarities."""
        return alike if self.assign == "similarity" else alike.log_softmax(-1)

    def _labels(self, shares: Tensor, alive: Tensor | None) -> Tensor:
        shares = shares.detach()
        return (shares if alive is None else shares.masked_fill(~alive[:, None, :, None], float("-inf"))).argmax(2)

    def clusters_of(self, points: Tensor, centroids: Tensor, valid: Tensor) -> Tensor:
        """The cluster of every token (b g n), by eqs. 2 and 4 alone; padding has any.

        Args:
            points: as they are compared (b g n y)
            centroids: (b g c y)
            valid: bool (b n), True = a real token
        """
        alike = self._alike(points, self.unit(centroids), self._lengths(points, valid), valid)
        return self._labels(self._shares(alike), None)

    def _membership(self, q: Tensor, call: Call) -> Tensor:
        valid = seated(q, call)
        points = self._points(q, call, valid).contiguous()
        centroids, alive = self._centroids(points, valid, call)
        alike = self._alike(points, centroids, self._lengths(points, valid), valid)
        return memberships(self._shares(alike), alive)

    # ------------------------------------------------------------------ what is learned

    def _state(
        self, points: Tensor, lengths: Tensor | None, centroids: Tensor, alike: Tensor, member: Tensor | None,
        labels: Tensor, valid: Tensor | None, alive: Tensor | None, call: Call,
    ) -> ClusterFormerState:  # fmt: skip
        (b, g, c, _), n = centroids.shape, points.shape[2]
        member = member if self.balance and torch.is_grad_enabled() else None
        if alike.requires_grad or not centroids.requires_grad:
            updated, sizes = _updated(alike, member, points, lengths, valid, alive)
        else:
            given = centroids, alike, member, points, lengths, valid, alive, self
            updated, sizes = _Updated.apply(*given)  # type: ignore[no-untyped-call]
        new = self._unit(updated, call)  # eq. 3
        marked = labels if valid is None else labels.masked_fill(~valid.unsqueeze(1), -1)
        kept = new.transpose(1, 2).flatten(2)
        if not torch.is_grad_enabled():
            return ClusterFormerState(kept, labels=marked)
        clustering = sorting = uneven = None
        compared = new if self.compare == "updated" else centroids
        of_batch = 1 / max(b * g, 1)  # an empty batch loses nothing
        if self.mu:  # Σ_j φ(P_j, Ĉ of j's cluster) = Σ_c φ(Ĉ_c, Σ of its members): nothing as large as P
            members = labels.unsqueeze(2) == torch.arange(c, device=labels.device).view(-1, 1)
            members = members.to(points.dtype) if lengths is None else members * lengths.to(points.dtype)
            close = compared * (members @ points)
            close = close if valid is None else n * close / valid.sum(-1).clamp(min=1).view(-1, 1, 1, 1)
            clustering = close.sum() * (-of_batch / n)
        if self.nu:
            sorting = (compared * compared.roll(1, 2)).sum() * (-of_batch / c)
        if sizes is not None:
            evenness = torch.special.entr(sizes + SMALL).sum(-1)  # (b g), at most log c
            many = math.log(c) if alive is None else alive.sum(-1, keepdim=True).clamp(min=1).log().to(sizes.dtype)
            gap = many - evenness
            uneven = (gap if valid is None else gap * valid.any(-1, keepdim=True)).sum() * of_batch
        return ClusterFormerState(kept, clustering, sorting, uneven, marked)


OF_STATE = ("compare", "trains", "mu", "nu", "balance", "fade", "pass_on")
CHOICES = {
    "scope": ("head", "shared"), "similarity": ("cosine", "inner"), "assign": ("share", "similarity"),
    "compare": ("updated", "given"), "trains": ("centroids", "map", "all"), "ties": ("forward", "turns"),
}  # fmt: skip


def memberships(shares: Tensor, alive: Tensor | None) -> Tensor:
    """A (b g c n): the shares U of a token, normalised over the centroids."""
    if alive is not None:
        shares = shares.masked_fill(~alive[:, None, :, None], torch.finfo(shares.dtype).min)
    return shares.softmax(2)


def _times(x: Tensor, factor: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x · factor in another dtype, in one step; x is given up, and nothing may be recorded."""
    return torch.mul(x, factor, out=x if x.dtype == dtype else x.new_empty(x.shape, dtype=dtype))


def _updated(
    alike: Tensor, member: Tensor | None, points: Tensor, lengths: Tensor | None, valid: Tensor | None,
    alive: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """U P of eq. 3 (b g c y); and of memberships the means over real tokens (b g c): how large clusters are."""
    share = alike.softmax(-1)  # U (eq. 2)
    if alive is not None:
        share = share * alive[:, None, :, None]
    if lengths is not None:
        share = share * lengths if share.requires_grad else _times(share, lengths, points.dtype)
    new = wide(share.to(points.dtype) @ points)
    if member is not None:
        member = member.mean(-1) if valid is None else (member * _evenly(valid, member)).sum(-1)
    return new, member


def _evenly(valid: Tensor, like: Tensor) -> Tensor:
    """What every real token weighs in a mean over them (b 1 1 n)."""
    return (valid.to(like.dtype) / valid.sum(-1, keepdim=True).clamp(min=1))[:, None, None]


class _Updated(torch.autograd.Function):
    """``_updated`` where the centroids alone are trained: what the backward needs of U (b g c n) is made anew there, so
    that nothing larger than the points is kept; but where memberships are."""

    @staticmethod
    def forward(
        ctx: Any, centroids: Tensor, shares: Tensor, member: Tensor | None, points: Tensor, lengths: Tensor | None,
        valid: Tensor | None, alive: Tensor | None, method: ClusterFormer,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        kept = None if member is None else shares
        ctx.save_for_backward(centroids, kept, member, points, lengths, valid, alive)
        ctx.method = method
        return _updated(shares, member, points, lengths, valid, alive)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, d_sizes: Tensor | None) -> tuple[Tensor | None, ...]:
        centroids, shares, member, points, lengths, valid, alive = ctx.saved_tensors
        share = ctx.method._alike(points, centroids, lengths, valid) if shares is None else shares
        share = share.softmax(-1)
        x = grad.to(points.dtype) @ points.mT  # from here on each step is as large as the points: one name lets go
        x = wide(x) if lengths is None else x * lengths
        x = x if alive is None else x * alive[:, None, :, None]
        x = torch._softmax_backward_data(x, share, -1, x.dtype)
        del share
        if member is not None and d_sizes is not None:
            each = d_sizes.unsqueeze(-1) * (1 / member.shape[3] if valid is None else _evenly(valid, member))
            x = x + _to_alike(each.expand_as(member), member, shares, ctx.method)
        x = _times(x, ctx.method._factor(lengths), points.dtype)
        return (x @ points).to(centroids.dtype), *[None] * 7


class _Memberships(torch.autograd.Function):
    """``memberships`` of points that the task trains, too, from shares that were made without a record."""

    @staticmethod
    def forward(
        ctx: Any, points: Tensor, centroids: Tensor, shares: Tensor, lengths: Tensor | None, alive: Tensor | None,
        method: ClusterFormer,
    ) -> Tensor:  # fmt: skip
        member = memberships(shares, alive)
        ctx.save_for_backward(points, centroids, shares, lengths, member)
        ctx.method = method
        return member

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        points, centroids, shares, lengths, member = ctx.saved_tensors
        x = _to_alike(grad, member, shares, ctx.method)
        x = _times(x, ctx.method._factor(lengths), points.dtype)
        d_points = None
        if ctx.needs_input_grad[0]:
            d_points = x.mT @ centroids.to(points.dtype)
            if ctx.method.similarity == "cosine":  # which does not see how long a point is
                along = (d_points * points).sum(-1, keepdim=True, dtype=lengths.dtype) * lengths.mT.square()
                d_points.addcmul_(points, along, value=-1)
        return d_points, (x @ points).to(centroids.dtype), *[None] * 4


def _to_alike(grad: Tensor, member: Tensor, shares: Tensor, method: ClusterFormer) -> Tensor:
    """The gradient of the similarities, from that of the memberships."""
    x = torch._softmax_backward_data(grad, member, 2, member.dtype)
    return x if method.assign == "similarity" else torch._log_softmax_backward_data(x, shares, -1, shares.dtype)


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
