"""Joining answers by their log-weights, safe for empty parts (lse -inf) in values and in gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .._types import Attended

NEVER = float("-inf")


def merge(a: Attended, b: Attended) -> Attended:
    """One answer over the union of two disjoint sets of keys."""
    highest = torch.maximum(a.lse, b.lse).detach()
    shift = torch.where(highest == NEVER, 0.0, highest)
    weight_a, weight_b = torch.exp(a.lse - shift), torch.exp(b.lse - shift)
    total = weight_a + weight_b
    some = torch.where(total > 0, total, 1.0)
    out = (weight_a / some).unsqueeze(-1) * a.out + (weight_b / some).unsqueeze(-1) * b.out
    return Attended(out, torch.where(total > 0, some.log() + shift, NEVER))


def broadcast(per_cluster: Tensor, labels: Tensor) -> Tensor:
    """Hand a cluster's row (b h c x) or number (b h c) to its members (b h n x) or (b h n); 0 for label -1."""
    number = per_cluster.dim() == 3
    rows = per_cluster.unsqueeze(-1) if number else per_cluster
    if rows.shape[2] == 0:
        taken = rows.new_zeros(*labels.shape, rows.shape[-1])
    else:
        taken = take(rows, labels)
    taken = taken.masked_fill((labels < 0).unsqueeze(-1), 0.0)
    return taken.squeeze(-1) if number else taken


def flat_index(at: Tensor, heads: int, length: int) -> Tensor:
    """Positions (b h ...) in each sequence -> row numbers of a (b heads length) tensor flattened to rows.

    ``heads`` may be fewer than h (grouped heads). -1 becomes the first row of its own sequence, never of another one.
    """
    b, h = at.shape[:2]
    sequence = torch.arange(b, device=at.device)[:, None] * heads + torch.arange(h, device=at.device) // (h // heads)
    return at.clamp(min=0) + (sequence * length).view(b, h, *[1] * (at.dim() - 2))


def take(x: Tensor, at: Tensor) -> Tensor:
    """Rows ``x[b, h, at[b, h, ...]]`` of x (b hk m d): (b h ... d). Whole rows are copied, which a CPU does fast."""
    rows = x.reshape(-1, x.shape[-1]).index_select(0, flat_index(at, x.shape[1], x.shape[2]).reshape(-1))
    return rows.view(*at.shape, x.shape[-1])
