"""Cutting work into pieces that stay in a CPU's cache (or in a sensible slice of a GPU's memory)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


def budget(x: Tensor) -> int:
    """How many numbers one intermediate piece may hold."""
    return 1 << 18 if x.device.type == "cpu" else 1 << 25


def spans(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, max(size, 1)):
        yield slice(start, min(start + max(size, 1), total))


def even(total: int, most: int) -> int:
    """The size of equal pieces, none larger than ``most``: a last one of a few rows would cost as much as a whole."""
    pieces = max(-(-total // max(most, 1)), 1)
    return -(-total // pieces)


def no_autocast(x: Tensor) -> torch.autocast:
    """Backward runs wherever the user calls it, also inside autocast: the ops' own products stay as they are."""
    return torch.autocast(x.device.type, enabled=False)


def wide(x: Tensor) -> Tensor:
    """fp32 or better: the precision in which every sum, softmax and mass is taken."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def exp_(x: Tensor) -> Tensor:
    """exp, in place, by powers of two, which a CPU makes in half the time. The last few numbers of a tensor are rounded
    otherwise than the others: not for a tensor that sequences share, or earlier tokens and later ones."""
    return x.mul_(LOG2_E).exp2_()
