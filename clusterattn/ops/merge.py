"""Joining answers by their log-weights, safe for empty parts (lse -inf) in values and in gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .._types import Attended

NEVER = float("-inf")


def finite(lse: Tensor) -> Tensor:
    """With 0 in the place of NEVER, to subtract."""
    return torch.where(lse == NEVER, 0.0, lse)


def merge(a: Attended, b: Attended) -> Attended:
    """One answer over the union of two disjoint sets of keys.

    Args:
        a: an answer over some keys
        b: an answer over other keys
    """
    highest = torch.maximum(a.lse, b.lse).detach()
    shift = torch.where(highest == NEVER, 0.0, highest)
    weight_a, weight_b = torch.exp(a.lse - shift), torch.exp(b.lse - shift)
    total = weight_a + weight_b
    safe = torch.where(total > 0, total, 1.0)
    out = (weight_a / safe).unsqueeze(-1) * a.out + (weight_b / safe).unsqueeze(-1) * b.out
    return Attended(out, torch.where(total > 0, safe.log() + shift, NEVER))
