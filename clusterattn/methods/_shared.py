"""What several recipes share: centroids' members, blocks of positions, the last resort of looking at oneself."""

from __future__ import annotations

import torch
from torch import Tensor

from .._types import Attended, Buckets, Call
from ..ops._chunks import wide
from ..ops.merge import NEVER, merge


def count(members: Tensor, clusters: int) -> Tensor:
    """How many members each cluster has: (b h c)."""
    b, h, _ = members.shape
    bins = torch.where(members < 0, clusters, members)
    tally = torch.zeros(b, h, clusters + 1, dtype=torch.int64, device=members.device)
    return tally.scatter_add(2, bins, torch.ones_like(bins))[..., :clusters]


def own_block(q: Tensor, k: Tensor, v: Tensor, block: int, call: Call) -> Attended:
    """Exact causal attention of each block of positions to its own keys; the first block sees its whole past."""
    b, h, n, _ = q.shape
    blocks = (n + block - 1) // block
    at = torch.arange(blocks * block, device=q.device).view(blocks, block)
    queries = torch.where(at < n, at, -1)
    keys = torch.where((at < n) & (at + call.mask.offset >= 0), at + call.mask.offset, -1)
    mine = call.ops.bucketed(
        q, k, v, Buckets(queries.expand(b, h, -1, -1), keys.expand(b, h, -1, -1)), call.mask, call.scale
    )
    if call.mask.offset <= 0:
        return mine
    before = torch.arange(call.mask.offset, device=q.device).expand(b, h, 1, -1)
    past = call.ops.bucketed(q, k, v, Buckets(queries[:1].expand(b, h, -1, -1), before), call.mask, call.scale)
    return merge(mine, past)


def or_self(answer: Attended, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Attended:
    """A query that met no key it may see attends to the key at its own position, where that key is real."""
    b, h, n, _ = q.shape
    at = torch.arange(n, device=q.device) + call.mask.offset
    real = call.mask.key_rows(q)[:, at.clamp(min=0)] & (at >= 0)  # (b n)
    at = at.clamp(min=0).expand(b, h, n)
    alone = (answer.lse == NEVER) & real.unsqueeze(1)
    lse = (wide(q) * wide(call.ops.take(k, at))).sum(-1) * call.scale
    out = torch.where(alone.unsqueeze(-1), call.ops.take(v, at).to(answer.out.dtype), answer.out)
    return Attended(out, torch.where(alone, lse, answer.lse))


def polytope(x: Tensor, drawn: Tensor, buckets: Tensor, call: Call) -> Tensor:
    """Cross-polytope hash: the nearest of ``buckets`` (b 1) random directions, taken with both signs, for each round.

    x (b h n d), drawn (r directions d) -> (b h r n). With fewer valid tokens fewer directions take part, so that
    padding does not change a hash.
    """
    half, directions = (buckets + 1) // 2, drawn.shape[1]
    taking_part = (torch.arange(directions, device=x.device) < half).repeat(1, 2).unsqueeze(1)  # (b 1 2*directions)
    hashes = []
    for one in range(drawn.shape[0]):
        both = torch.cat([drawn[one], -drawn[one]]).expand(*x.shape[:2], -1, -1)
        which = call.ops.assign(x, both, taking_part, signs=True)  # the largest product
        hashes.append(torch.where(which < directions, which, which - directions + half.view(-1, 1, 1)))
    return torch.stack(hashes, 2)
