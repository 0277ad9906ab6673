"""Each query attends to the few keys of its own cluster: near keys as they are, far parts as one virtual key each.

Queries of one cluster fill tiles (see seating); a tile sits with its cluster's keys. With a slope M the values of the
far keys move with the query, out += scale * w_far(q) * (q - c) M: to the weights this is one more term in the value of
every far key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._chunks import budget, exp_, wide
from ..merge import NEVER
from ..rows import flat_index
from .seating import LONG, Limits, by_size, in_tiles


@dataclass(frozen=True)
class Offer:
    """What a cluster offers its queries: t near keys, taken where they lie, then p far parts; each with a bias."""

    k: Tensor  # (b hk m d)
    v: Tensor  # (b hk m e)
    near_at: Tensor  # (b h c t), any number where the bias is -inf
    far_keys: Tensor  # (b h c p d)
    far_values: Tensor  # (b h c p e)
    bias: Tensor  # (b h c t+p): added to the logits; -inf where there is no key
    slope: Tensor | None  # (b h blocks d e)
    c: Tensor | None  # (b h c d): the centroids from which the slope is taken
    per: int  # clusters of one block; 0: there is one block

    @property
    def near(self) -> int:
        return self.near_at.shape[3]


@dataclass(frozen=True)
class QueriesPiece:
    """A few tiles: of whole heads, or of one."""

    heads: slice  # of (b h)
    rows: Tensor  # (g s) into (b h n), any row for an empty seat
    real: Tensor  # (g s)
    cluster: Tensor  # (g) into (b h c)
    at: Tensor  # (g t) into (b hk m): the near keys
    x: Tensor  # (g s d)
    keys: tuple[Tensor, ...]  # (g t d), (g p d): the near ones, and the far ones where there are any
    values: tuple[Tensor, ...]  # (g t e), (g p e)
    logits: Tensor  # (g s t+p), -inf where unseen


def _pieces(q: Tensor, labels: Tensor, offer: Offer, scale: float) -> Iterator[QueriesPiece]:
    d, (hk, m, e), (c, t) = q.shape[3], offer.v.shape[1:], offer.bias.shape[2:]
    x_rows, k_rows, v_rows = q.reshape(-1, d), offer.k.reshape(-1, d), offer.v.reshape(-1, e)
    near = flat_index(offer.near_at, hk, m).flatten(0, 2)
    far_keys, far_values, bias = (x.flatten(0, 2) for x in (offer.far_keys, offer.far_values, offer.bias))
    limits = Limits(2 * budget(q), max(t, d), t * d)  # fewer pieces are worth more here than a smaller one's cache
    seated = by_size if _is_long(q, offer) else in_tiles
    for heads, rows, real, cluster in seated(labels, c, limits):
        x = wide(x_rows.index_select(0, rows.flatten())).view(*rows.shape, d)
        at = near.index_select(0, cluster)
        keys, values = _both(k_rows, at, far_keys, cluster), _both(v_rows, at, far_values, cluster)
        logits = _beside([torch.bmm(x, each.mT) for each in keys]).mul_(scale)
        logits += bias.index_select(0, cluster).unsqueeze(1)
        yield QueriesPiece(heads, rows, real, cluster, at, x, keys, values, logits)


def _is_long(q: Tensor, offer: Offer) -> bool:
    """Is every head worked on by itself? Not blocks of a causal call: not a bit of an answer may depend on how large
    later clusters are."""
    return q.device.type == "cpu" and q.shape[2] >= LONG and not offer.per


def _both(rows: Tensor, at: Tensor, far: Tensor, cluster: Tensor) -> tuple[Tensor, ...]:
    """The near rows of each tile, and the far ones of its cluster."""
    near = wide(rows.index_select(0, at.flatten())).view(*at.shape, rows.shape[-1])
    return (near, wide(far.index_select(0, cluster))) if far.shape[1] else (near,)


def _beside(near_and_far: list[Tensor]) -> Tensor:
    return near_and_far[0] if len(near_and_far) == 1 else torch.cat(near_and_far, -1)


def _mixed(weights: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
    """weights (g s t+p), rows (g t w) and (g p w) -> (g s w)"""
    near = rows[0].shape[1]
    total = torch.bmm(weights[..., :near], rows[0])
    return total if len(rows) == 1 else total.baddbmm_(weights[..., near:], rows[1])


def _moved(p: QueriesPiece, offer: Offer, scale: float) -> tuple[Tensor, Tensor]:
    """scale (q - c) M and q - c of a piece: (g s e), (g s d)."""
    assert offer.slope is not None
    assert offer.c is not None
    apart = p.x - wide(offer.c).flatten(0, 2).index_select(0, p.cluster).unsqueeze(1)
    return _times(apart, p, offer.slope, offer, scale), apart


def _times(x: Tensor, p: QueriesPiece, slope: Tensor, offer: Offer, scale: float) -> Tensor:
    """x (g s d) times the slope (b h blocks d e) of its head, or of its cluster's block."""
    heads, (d, e) = p.heads.stop - p.heads.start, slope.shape[-2:]
    if slope.shape[2] == 1:
        return (x.reshape(heads, -1, d) @ slope.flatten(0, 2)[p.heads]).view(*x.shape[:2], e) * scale
    return torch.bmm(x, slope.flatten(0, 2).index_select(0, _block(p, offer))) * scale


def _block(p: QueriesPiece, offer: Offer) -> Tensor:
    """The block of each tile's cluster, counted over all heads: (g)."""
    clusters = offer.bias.shape[2]
    blocks = -(-clusters // offer.per)
    return p.cluster // clusters * blocks + p.cluster % clusters // offer.per


def forward(q: Tensor, labels: Tensor, offer: Offer, scale: float) -> tuple[Tensor, Tensor]:
    (b, h, n, _), e = q.shape, offer.v.shape[-1]
    acc = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(b * h * n + 1, e, dtype=acc, device=q.device)  # one more row for empty seats
    lse = torch.full((b * h * n + 1,), NEVER, dtype=acc, device=q.device)
    for p in _pieces(q, labels, offer, scale):
        highest = p.logits.amax(-1, keepdim=True)
        weights = p.logits.sub_(torch.where(highest == NEVER, 0.0, highest))
        weights = exp_(weights) if _is_long(q, offer) else weights.exp_()
        total = weights.sum(-1, keepdim=True)
        weights.div_(torch.where(total > 0, total, 1.0))
        answer = _mixed(weights, p.values)
        if offer.slope is not None:
            far = weights[..., offer.near :].sum(-1, keepdim=True)
            answer += far * _moved(p, offer, scale)[0]
        rows = torch.where(p.real, p.rows, b * h * n).flatten()
        out[rows] = answer.view(-1, e)
        lse[rows] = (total.log_() + highest).view(-1)
    return out[:-1].view(b, h, n, e), lse[:-1].view(b, h, n)


@dataclass(frozen=True)
class FineGradients:
    """Of everything that is offered, and of the queries; None where there is no slope."""

    q: Tensor
    k: Tensor
    v: Tensor
    far_keys: Tensor
    far_values: Tensor
    bias: Tensor
    slope: Tensor | None
    c: Tensor | None


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, labels: Tensor, offer: Offer, out: Tensor, lse: Tensor, scale: float
) -> FineGradients:
    (b, h, n, d), e, acc = q.shape, out.shape[-1], lse.dtype
    delta = (d_out * out).sum(-1)
    delta = (delta if d_lse is None else delta - d_lse).reshape(-1)
    flat_lse = torch.where(lse == NEVER, 0.0, lse).reshape(-1)
    d_rows = d_out.reshape(-1, e)
    dq = torch.zeros(b * h * n + 1, d, dtype=acc, device=q.device)

    def nothing(x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=acc, device=q.device).flatten(0, 2)

    dk, dv, d_far_keys, d_far_values, d_bias = map(
        nothing, (offer.k, offer.v, offer.far_keys, offer.far_values, offer.bias)
    )
    d_slope = d_c = None
    if offer.slope is not None and offer.c is not None:
        d_slope, d_c = nothing(offer.slope), nothing(offer.c)
    for p in _pieces(q, labels, offer, scale):
        real, at, near = p.real.unsqueeze(-1), p.at.flatten(), offer.near
        dy = d_rows.index_select(0, p.rows.flatten()).view(*p.rows.shape, e) * real
        weights = p.logits.sub_(flat_lse[p.rows].unsqueeze(-1)).masked_fill_(~real, NEVER).exp_()
        ds = _beside([torch.bmm(dy, each.mT) for each in p.values])
        d_apart = None
        if offer.slope is not None and d_slope is not None and d_c is not None:
            moved, apart = _moved(p, offer, scale)
            far = weights[..., near:].sum(-1, keepdim=True)
            ds[..., near:] += (dy * moved).sum(-1, keepdim=True)
            pulled = dy * (far * scale)
            d_apart = _times(dy * far, p, offer.slope.mT, offer, scale)
            _add_outer(d_slope, apart, pulled, p, offer)
            d_c.index_add_(0, p.cluster, d_apart.sum(1), alpha=-1)
        ds = ds.sub_((delta[p.rows].unsqueeze(-1)) * real).mul_(weights)
        d_bias.index_add_(0, p.cluster, ds.sum(1))
        values = torch.bmm(weights.mT, dy)
        dv.index_add_(0, at, values[:, :near].reshape(-1, e))
        d_far_values.index_add_(0, p.cluster, values[:, near:])
        ds.mul_(scale)
        keys = torch.bmm(ds.mT, p.x)
        dk.index_add_(0, at, keys[:, :near].reshape(-1, d))
        d_far_keys.index_add_(0, p.cluster, keys[:, near:])
        mine = _mixed(ds, p.keys)
        rows = torch.where(p.real, p.rows, b * h * n).flatten()
        dq[rows] = (mine if d_apart is None else mine + d_apart).view(-1, d)
    return FineGradients(
        dq[:-1].view(b, h, n, d), dk.view(offer.k.shape), dv.view(offer.v.shape),
        d_far_keys.view(offer.far_keys.shape), d_far_values.view(offer.far_values.shape),
        d_bias.view(offer.bias.shape),
        None if d_slope is None or offer.slope is None else d_slope.view(offer.slope.shape),
        None if d_c is None or offer.c is None else d_c.view(offer.c.shape),
    )  # fmt: skip


def _add_outer(d_slope: Tensor, apart: Tensor, pulled: Tensor, p: QueriesPiece, offer: Offer) -> None:
    """d_slope (b h blocks) d e += (q - c)^T pulled, for each tile in its place."""
    heads, (d, e) = p.heads.stop - p.heads.start, d_slope.shape[1:]
    if not offer.per:
        d_slope[p.heads] += apart.reshape(heads, -1, d).mT @ pulled.reshape(heads, -1, e)
    else:
        d_slope.index_add_(0, _block(p, offer), torch.bmm(apart.mT, pulled))
