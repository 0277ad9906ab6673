"""What the centroids find among the keys of all ranks, and what the queries of this one make of it.

Every rank runs ``coarse`` over its own keys and so proposes near keys. The best proposals of all ranks are the near
keys; those that were not chosen go back to the far part they belong to; then the far parts are added up over the ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._types import Attended, Call, Clusters
from ..methods.clustered import Clustered
from ..methods.improved import Improved
from ..ops._chunks import budget, spans, wide
from ..ops.coarse import SLOPE_CLUSTERS, Coarse
from ..ops.coarse import shares as shares_of
from ..ops.fine import fine
from ..ops.merge import NEVER
from ..ops.rows import broadcast, take
from ._collectives import Ranks


def attend(
    method: Clustered, q: Tensor, k: Tensor, v: Tensor, groups: Clusters, keys: int, ranks: Ranks, call: Call
) -> Attended:
    """keys: how many there are on all ranks. Parts of the groups are those of this rank's keys."""
    c = groups.means
    if not isinstance(method, Improved):
        found, *_ = coarse(c, k, v, groups, 0, call.lse, None, ranks, call)
        out, level = found.out.squeeze(3), found.lse.squeeze(3)
        answer = broadcast(out.to(v.dtype), groups.labels)
        if not call.lse:
            return Attended(answer, level.new_zeros(()).expand(groups.labels.shape))
        key = found.mean_key.squeeze(3)
        lse = broadcast(level - (wide(c) * key).sum(-1) * call.scale, groups.labels)
        lse = torch.where(groups.labels < 0, NEVER, lse)
        return Attended(answer, lse + (wide(q) * broadcast(key, groups.labels)).sum(-1) * call.scale)
    shares = shares_of(groups.counts, 0, groups.means) if method.slope else None
    tangent = method.mass == "tangent"
    found, near_keys, near_values = coarse(c, k, v, groups, min(method.top, keys), tangent, shares, ranks, call)
    return fine(q, c, near_keys, near_values, groups.labels, found, call.scale, method.mass, method.detach_mass)


def coarse(
    c: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Clusters,
    top: int,
    tangent: bool,
    shares: Tensor | None,
    ranks: Ranks,
    call: Call,
) -> tuple[Coarse, Tensor, Tensor]:
    """As ops.coarse over the keys of all ranks, and the near keys and values (b h (c t) d), (b h (c t) e), to which
    ``near_at`` points."""
    (b, h, rows, d), e = c.shape, v.shape[3]
    own = call.ops.coarse(c, k, v, call.mask, call.scale, top=top, tangent=tangent, parts=groups.parts)
    near_at = F.pad(own.near_at, (0, top - own.near_at.shape[-1]), value=-1)  # a share may have fewer keys
    pairs = torch.cat([take(k, near_at), take(v, near_at)], -1)  # (b h c t d+e)
    scores = torch.where(near_at < 0, NEVER, (wide(c).unsqueeze(3) * wide(pairs[..., :d])).sum(-1) * call.scale)
    real, here, slot = _chosen(scores.detach(), ranks)
    picked = pairs.gather(3, slot.unsqueeze(-1).expand(*slot.shape, d + e))
    near = ranks.sum(torch.where(here.unsqueeze(-1), picked, 0.0), "near keys and values") if top else pairs
    left = torch.ones(*scores.shape[:3], top + 1, dtype=torch.bool, device=c.device)
    left = left.scatter(3, torch.where(here, slot, top), False)[..., :top] & (near_at >= 0)
    out, mean_key, lse = _far(own, pairs, scores, left, near_at, groups, tangent, ranks)
    slope = None
    if shares is not None:
        chosen_at = torch.where(left, -1, near_at)
        slope = _slope(c, k, v, chosen_at, shares, out, mean_key, lse, ranks, call)
    where = torch.arange(rows * top, device=c.device).view(rows, top).expand(b, h, rows, top)
    flat = near.flatten(2, 3)
    levels = torch.where(real, (wide(c).unsqueeze(3) * wide(near[..., :d])).sum(-1) * call.scale, NEVER)
    found = Coarse(out, lse, mean_key, torch.where(real, where, -1), _logsumexp(levels), slope)
    return found, flat[..., :d], flat[..., d:]


def _chosen(scores: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """The best of all ranks' proposals, scores (b h c t): is there one, was it mine, and which of my proposals."""
    top = scores.shape[-1]
    if top == 0:
        nobody = torch.zeros_like(scores, dtype=torch.bool)
        return nobody, nobody, nobody.long()
    best, at = ranks.gather(scores, "near keys, scores").movedim(0, 3).flatten(3).topk(top, -1)
    real = best > NEVER
    return real, real & (at // top == ranks.mine), at % top


def _far(
    own: Coarse,
    pairs: Tensor,
    scores: Tensor,
    left: Tensor,
    near_at: Tensor,
    groups: Clusters,
    tangent: bool,
    ranks: Ranks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean value, mean key and log-weight of every far part over all ranks: own parts, with the proposals that were not
    chosen back in theirs."""
    e, d = own.out.shape[-1], pairs.shape[-1] - own.out.shape[-1]
    part_of = torch.zeros_like(near_at)
    if groups.parts is not None:
        part_of = take(groups.parts.labels.unsqueeze(-1), near_at).squeeze(-1).clamp(min=0)
    back = torch.where(left, scores, NEVER)
    highest = own.lse.detach().scatter_reduce(3, part_of, back.detach(), "amax")
    shift = ranks.highest(highest, "far parts, level")
    shift = torch.where(shift == NEVER, 0.0, shift)
    weight = torch.exp(own.lse - shift).unsqueeze(-1)  # (b h c p 1)
    total = torch.cat([weight, weight * own.out, weight * own.mean_key], -1)
    single = torch.exp(back - shift.gather(3, part_of)).unsqueeze(-1)  # (b h c t 1)
    pairs = wide(pairs)
    terms = torch.cat([single, single * pairs[..., d:], *([single * pairs[..., :d]] if tangent else [])], -1)
    total = total.scatter_add(3, part_of.unsqueeze(-1).expand_as(terms), terms)
    total = ranks.sum(total, "far parts")
    weight = total[..., :1]
    safe = torch.where(weight > 0, weight, 1.0)
    lse = torch.where(weight > 0, safe.log() + shift.unsqueeze(-1), NEVER).squeeze(-1)
    means = total[..., 1:] / safe
    return means[..., :e], means[..., e:], lse


def _slope(
    c: Tensor,
    k: Tensor,
    v: Tensor,
    near_at: Tensor,
    shares: Tensor,
    out: Tensor,
    mean_key: Tensor,
    lse: Tensor,
    ranks: Ranks,
    call: Call,
) -> Tensor:
    """M of ops/coarse/reference.py, over the far keys of all ranks: (b h 1 d e). The weights of a key are those of all
    ranks, so it follows the far parts; its scores are made a second time, for the few clusters that make the slope."""
    few = min(SLOPE_CLUSTERS, c.shape[2])
    group, m = c.shape[1] // k.shape[1], k.shape[2]
    c, near_at, shares = c[:, :, :few], near_at[:, :, :few], shares[:, :, :few]
    out, mean_key, lse = out[:, :, :few], mean_key[:, :, :few], lse[:, :, :few]
    whole = _logsumexp(lse)  # (b h c): of everything far
    level = torch.where(whole == NEVER, 0.0, whole)
    within = torch.zeros(*c.shape[:2], c.shape[3], v.shape[3], dtype=out.dtype, device=c.device)
    for piece in spans(m, budget(c) * 4 // max(c.shape[0] * c.shape[1] * few, 1)):
        real = None if call.mask.keys is None else call.mask.keys[:, piece]
        at = torch.where((near_at >= piece.start) & (near_at < piece.stop), near_at - piece.start, -1)
        within = within + checkpoint(
            _received,
            c,
            k[:, :, piece],
            v[:, :, piece],
            level,
            shares,
            at,
            real,
            call.scale,
            group,
            use_reentrant=False,
            preserve_rng_state=False,
        )
    within = ranks.sum(within, "slope")
    amount = torch.exp(lse - level.unsqueeze(-1)) * shares.unsqueeze(-1)  # (b h c p): pi a
    between = (mean_key * amount.unsqueeze(-1)).flatten(2, 3).mT @ out.flatten(2, 3)
    return (within - between).unsqueeze(2)


def _received(
    c: Tensor,
    k: Tensor,
    v: Tensor,
    level: Tensor,
    shares: Tensor,
    near_at: Tensor,
    real: Tensor | None,
    scale: float,
    group: int,
) -> Tensor:
    """sum_l omega_l k_l v_l^T over a few keys, (b h d e)."""
    keys, values = (wide(x).repeat_interleave(group, 1) for x in (k, v))
    m = keys.shape[2]
    scores = wide(c) @ keys.mT * scale
    near = torch.zeros(*scores.shape[:3], m + 1, dtype=torch.bool, device=c.device)
    near = near.scatter_(3, torch.where(near_at < 0, m, near_at), True)[..., :m]
    scores = scores.masked_fill(near if real is None else near | ~real[:, None, None], NEVER)
    omega = (torch.exp(scores - level.unsqueeze(-1)) * shares.unsqueeze(-1)).sum(2)  # (b h m)
    return (keys * omega.unsqueeze(-1)).mT @ values


def _logsumexp(x: Tensor) -> Tensor:
    """Over the last dimension; of nothing it is -inf, and passes no gradient."""
    if x.shape[-1] == 0:
        return torch.full(x.shape[:-1], NEVER, dtype=x.dtype, device=x.device)
    any_real = (x > NEVER).any(-1)
    safe = torch.where(any_real.unsqueeze(-1), x, 0.0)
    return torch.where(any_real, safe.logsumexp(-1), NEVER)
