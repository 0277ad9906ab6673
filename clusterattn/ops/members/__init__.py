"""members: the queries of each cluster, one after another. Kernels read clusters so; the reference need not."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._types import Members
from .. import _backends
from .._op import op


@op("members")
def _members(labels: Tensor, clusters: int, backend: str) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _backends.function("members", backend)(labels.flatten(0, 1), clusters)
    return found


@_members.fake
def _(labels: Tensor, clusters: int, backend: str) -> tuple[Tensor, Tensor]:
    lead = labels.shape[0] * labels.shape[1]
    return (
        labels.new_empty((lead, labels.shape[2]), dtype=torch.int32),
        labels.new_empty((lead, clusters + 2), dtype=torch.int32),
    )


def members(labels: Tensor, clusters: int, q: Tensor, *, backend: str = "reference") -> Members | None:
    """labels (b h n) of queries q, -1 for nobody's. None where no kernel will ask for it."""
    name = _backends.serving("members", backend, labels, clusters, q)
    return None if name == _backends.REFERENCE else Members(*_members(labels, clusters, name))
