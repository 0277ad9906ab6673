"""The best keys of every query, by looking at all of them: what an oracle would choose."""

from __future__ import annotations

import torch
from torch import Tensor

from .._chunks import budget, spans, wide
from ..merge import NEVER


def top_keys(q: Tensor, k: Tensor, key_mask: Tensor | None, top: int, causal: bool) -> Tensor:
    """The positions of the ``top`` best keys of every query (b h n t), -1 where fewer are visible."""
    (b, h, n, d), (hk, m) = q.shape, k.shape[1:3]
    few = min(top, m)
    found = torch.full((b * hk, h // hk, n, few), -1, dtype=torch.int64, device=q.device)
    key_mask = None if key_mask is None else key_mask.repeat_interleave(hk, 0)
    keys, mine = k.reshape(b * hk, m, d), q.reshape(b * hk, h // hk, n, d)
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


def closest(c: Tensor, points: Tensor, valid: Tensor | None, top: int) -> Tensor:
    return top_keys(c, points, valid, top, False)
