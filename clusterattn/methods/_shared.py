"""What several recipes share: blocks of positions."""

from __future__ import annotations

import torch
from torch import Tensor

from .._types import Attended, Buckets, Call
from ..ops.merge import merge


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
