"""fine: each query attends exactly to the few keys of its own cluster.

The definition is a seating plan for bucketed attention: the queries of one cluster fill tiles, and each tile sits with
the keys of its cluster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._types import Attended, Buckets, Mask
from .. import tables
from ..bucketed import bucketed

TILE = 32  # queries of one cluster that attend together


def fine(
    q: Tensor, labels: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float, *, backend: str = "reference"
) -> Attended:
    """q (b h n d), labels (b h n) with -1 for nobody's, keys (b h c t d), values (b h c t e), bias (b h c t)."""
    c, t = keys.shape[2:4]
    table, families = tables.tiles(labels, c, TILE)
    seats = tables.family_of(families, table.shape[2]).unsqueeze(-1) * t + torch.arange(t, device=q.device)
    everything = Mask(q.shape[2], c * t)  # what may be seen is already in the choice of keys and in the bias
    return bucketed(
        q, keys.flatten(2, 3), values.flatten(2, 3), Buckets(table, seats), everything, scale, bias=bias.flatten(2, 3),
        families=families, backend=backend,
    )  # fmt: skip
