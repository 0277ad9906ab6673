"""members: the queries of each cluster, one after another. Kernels read clusters so; the reference need not."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._types import Members
from .. import _backends
from .._op import op

_Four = tuple[Tensor, Tensor, Tensor, Tensor]


@op("members")
def _members(labels: Tensor, clusters: int, parts: bool, backend: str) -> _Four:
    found: _Four = _backends.function("members", backend)(labels.flatten(0, 1), clusters, parts)
    return found


@_members.fake
def _(labels: Tensor, clusters: int, parts: bool, backend: str) -> _Four:
    lead, n = labels.shape[0] * labels.shape[1], labels.shape[2]
    order, first, place, largest = (
        labels.new_empty((lead, size), dtype=torch.int32)
        for size in (n, clusters + 2, n if parts else 0, clusters if parts else 0)
    )
    return order, first, place, largest


def members(
    labels: Tensor, clusters: int, q: Tensor, *, parts: bool = False, backend: str = "reference"
) -> Members | None:
    """labels (b h n) of queries q, -1 for nobody's; or of keys, where they are ``parts``. None where no kernel will ask
    for it."""
    name = _backends.serving("members", backend, labels, clusters, q)
    if name == _backends.REFERENCE:
        return None
    order, first, place, largest = _members(labels, clusters, parts, name)
    return Members(order, first, place, largest) if parts else Members(order, first)
