"""A few queries, answered exactly over the keys of all ranks: the queries travel, and not the keys."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .._attention import attention
from ..methods import Exact
from ..ops.merge import NEVER
from ._collectives import Ranks, Traffic
from ._share import at_least_one


def few_exactly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    traffic: Traffic | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries (b h n d), a few, over the keys of all ranks: out (b h n e) and its
    log-weight (b h n), with gradient. What travels grows with the queries: every rank answers those of all over its own
    keys, and the answers are merged. Every rank of the group has to call it; n may differ, and be 0.

    Args:
        q: this rank's few queries (b h n d)
        k: this rank's keys (b hk m d)
        v: this rank's values (b hk m e)
        group: the ranks that share the sequence; None: all
        key_mask: bool (b m) of this rank's share, True = a real key
        scale: of the logits, 1/sqrt(d) by default
        traffic: counts what is sent
    """
    ranks = Ranks(group, traffic)
    lengths = ranks.gather(torch.tensor(q.shape[2], device=q.device), "exact rows, lengths").tolist()
    before, mine = sum(lengths[: ranks.mine]), q.shape[2]
    asked = ranks.sum(F.pad(q, (0, 0, before, sum(lengths) - before - mine)), "exact rows, queries")
    k, keys = at_least_one(k, key_mask)
    v, _ = at_least_one(v, key_mask)
    out, lse = attention(asked, k, v, method=Exact(), key_mask=keys, scale=scale, return_lse=True)
    shift = ranks.highest(lse, "exact rows, level")
    shift = torch.where(shift == NEVER, 0.0, shift)
    weight = torch.exp(lse - shift).unsqueeze(-1)
    total = ranks.sum(torch.cat([weight, weight * out.to(weight.dtype)], -1), "exact rows, answers")
    weight = total[..., :1]
    safe = torch.where(weight > 0, weight, 1.0)
    level = torch.where(weight > 0, safe.log() + shift.unsqueeze(-1), NEVER).squeeze(-1)
    own = slice(before, before + mine)
    return (total[..., 1:] / safe)[:, :, own].to(v.dtype), level[:, :, own]
