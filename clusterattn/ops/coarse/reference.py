"""Centroids attend to all keys; each takes its ``top`` best keys aside as near keys and averages over the rest.

Rows may see only a prefix of the keys (block-causal attention): ``per`` consecutive rows belong to one block and
block j sees the first ``first + j * step`` keys. per = 0: every row sees every key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._chunks import budget, spans, wide
from ..merge import NEVER


@dataclass(frozen=True)
class Reach:
    scale: float
    top: int
    tangent: bool  # is the mean far key wanted?
    per: int
    first: int
    step: int


@dataclass(frozen=True)
class Piece:
    heads: slice  # of (b hk)
    rows: slice  # of c
    seen: int  # how many keys these rows may see
    c: Tensor  # (heads (group rows) d)
    k: Tensor  # (heads seen d)
    v: Tensor  # (heads seen e)
    scores: Tensor  # (heads (group rows) seen), -inf where masked


def _pieces(c: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, reach: Reach) -> Iterator[Piece]:
    """c (b*hk group c d), k (b*hk m d), v (b*hk m e), key_mask (b*hk m)."""
    lead, group, rows, d = c.shape
    m = k.shape[1]
    blocks = [(slice(0, rows), m)]
    if reach.per:
        blocks = [
            (rows_of, min(max(reach.first + j * reach.step, 0), m)) for j, rows_of in enumerate(spans(rows, reach.per))
        ]
    for rows_of, seen in blocks:
        size = group * (rows_of.stop - rows_of.start) * max(seen, d, 1)
        for heads in spans(lead, budget(c) * 4 // max(size, 1)):
            few = wide(c[heads, :, rows_of]).flatten(1, 2)
            keys, values = wide(k[heads, :seen]), wide(v[heads, :seen])
            scores = torch.bmm(few, keys.mT).mul_(reach.scale)
            if key_mask is not None:
                scores.masked_fill_(~key_mask[heads, None, :seen], NEVER)
            yield Piece(heads, rows_of, seen, few, keys, values, scores)


def _by_key_head(x: Tensor, hk: int) -> Tensor:
    """(b h ...) -> (b*hk group ...)"""
    b, h = x.shape[:2]
    return x.reshape(b * hk, h // hk, *x.shape[2:])


def _mask_rows(key_mask: Tensor | None, hk: int) -> Tensor | None:
    return None if key_mask is None else key_mask.repeat_interleave(hk, 0)


def forward(
    c: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, reach: Reach
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (b, h, rows, d), (hk, m, e) = c.shape, v.shape[1:]
    top, acc = min(reach.top, m), torch.promote_types(c.dtype, torch.float32)
    lead = (b * hk, h // hk, rows)
    out = torch.zeros(*lead, e, dtype=acc, device=c.device)
    mean_key = torch.zeros(*lead, d if reach.tangent else 0, dtype=acc, device=c.device)
    lse = torch.full(lead, NEVER, dtype=acc, device=c.device)
    near_lse = torch.full(lead, NEVER, dtype=acc, device=c.device)
    near_at = torch.full((*lead, top), -1, dtype=torch.int64, device=c.device)
    for p in _pieces(
        _by_key_head(c, hk), k.reshape(b * hk, m, d), v.reshape(b * hk, m, e), _mask_rows(key_mask, hk), reach
    ):
        place = (p.heads, slice(None), p.rows)
        shape = out[place].shape[:-1]
        few = min(top, p.seen)
        if few:
            best, at = p.scores.topk(few, -1, sorted=False)
            near_lse[place] = best.logsumexp(-1).view(shape)
            near_at[..., :few][place] = torch.where(best == NEVER, -1, at).view(*shape, few)
            p.scores.scatter_(-1, at, NEVER)
        if p.seen == 0:
            continue
        highest = p.scores.amax(-1, keepdim=True)
        weights = p.scores.sub_(torch.where(highest == NEVER, 0.0, highest)).exp_()
        total = weights.sum(-1, keepdim=True)
        safe = torch.where(total > 0, total, 1.0)
        out[place] = torch.bmm(weights, p.v).div_(safe).view(*shape, e)
        if reach.tangent:
            mean_key[place] = torch.bmm(weights, p.k).div_(safe).view(*shape, d)
        lse[place] = (total.log_() + highest).view(shape)
    return (
        out.view(b, h, rows, e), mean_key.view(b, h, rows, mean_key.shape[-1]), lse.view(b, h, rows),
        near_lse.view(b, h, rows), near_at.view(b, h, rows, top),
    )  # fmt: skip


def backward(
    d_out: Tensor, d_mean: Tensor, d_lse: Tensor, d_near: Tensor,
    c: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None,
    out: Tensor, mean_key: Tensor, lse: Tensor, near_lse: Tensor, near_at: Tensor, reach: Reach,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (b, h, rows, d), (hk, m, e) = c.shape, v.shape[1:]
    acc = lse.dtype
    dc = torch.zeros(b * hk, h // hk, rows, d, dtype=acc, device=c.device)
    dk = torch.zeros(b * hk, m, d, dtype=acc, device=c.device)
    dv = torch.zeros(b * hk, m, e, dtype=acc, device=c.device)
    delta = (d_out * out).sum(-1) - d_lse
    if reach.tangent:
        delta = delta + (d_mean * mean_key).sum(-1)
    d_out, d_mean, d_near, delta, lse, near_lse, near_at = (
        _by_key_head(x, hk) for x in (d_out, d_mean, d_near, delta, lse, near_lse, near_at)
    )
    for p in _pieces(
        _by_key_head(c, hk), k.reshape(b * hk, m, d), v.reshape(b * hk, m, e), _mask_rows(key_mask, hk), reach
    ):
        if p.seen == 0:
            continue
        place, flat = (p.heads, slice(None), p.rows), p.scores.shape[:2]
        at = near_at[place][..., : min(near_at.shape[-1], p.seen)].reshape(*flat, -1)
        theirs = lse[place].reshape(*flat, 1)
        near = p.scores.gather(-1, at.clamp(min=0)).sub_(_finite(near_lse[place]).reshape(*flat, 1)).exp_()
        near = torch.where(at >= 0, near * d_near[place].reshape(*flat, 1), 0.0)
        p.scores.scatter_add_(-1, at.clamp(min=0), torch.where(at >= 0, NEVER, 0.0).to(acc))
        weights = p.scores.sub_(_finite(theirs)).exp_()
        dy = d_out[place].reshape(*flat, e)
        dv[p.heads, : p.seen] += torch.bmm(weights.mT, dy)
        ds = torch.bmm(dy, p.v.mT)
        if reach.tangent:
            dm = d_mean[place].reshape(*flat, d)
            dk[p.heads, : p.seen] += torch.bmm(weights.mT, dm)
            ds.baddbmm_(dm, p.k.mT)
        ds.sub_(delta[place].reshape(*flat, 1)).mul_(weights).scatter_add_(-1, at.clamp(min=0), near).mul_(reach.scale)
        dc[place] = torch.bmm(ds, p.k).view(dc[place].shape)
        dk[p.heads, : p.seen] += torch.bmm(ds.mT, p.c)
    return dc.view(b, h, rows, d), dk.view(b, hk, m, d), dv.view(b, hk, m, e)


def _finite(lse: Tensor) -> Tensor:
    return torch.where(lse == NEVER, 0.0, lse)


def top_keys(q: Tensor, k: Tensor, key_mask: Tensor | None, top: int, causal: bool) -> Tensor:
    """The positions of the ``top`` best keys of every query (b h n t), -1 where fewer are visible."""
    (b, h, n, d), (hk, m) = q.shape, k.shape[1:3]
    few = min(top, m)
    found = torch.full((b * hk, h // hk, n, few), -1, dtype=torch.int64, device=q.device)
    key_mask = _mask_rows(key_mask, hk)
    keys, mine = k.reshape(b * hk, m, d), _by_key_head(q, hk)
    key_at = torch.arange(m, device=q.device)
    for heads in spans(b * hk, 1):
        for rows in spans(n, budget(q) * 4 // max(m * (h // hk), 1)):
            scores = torch.matmul(wide(mine[heads, :, rows]), wide(keys[heads]).unsqueeze(1).mT)
            if key_mask is not None:
                scores.masked_fill_(~key_mask[heads, None, None], NEVER)
            if causal:
                query_at = torch.arange(rows.start, rows.stop, device=q.device) + m - n
                scores.masked_fill_(key_at > query_at.unsqueeze(-1), NEVER)
            best, at = scores.topk(few, -1)
            found[heads, :, rows] = torch.where(best == NEVER, -1, at)
    return found.view(b, h, n, few)
