"""members: the queries of each cluster, one after another. Kernels read clusters so; the reference need not."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._types import Members
from .._jit import use_kernel, why_no_kernels
from . import kernels


@torch.library.custom_op("clusterattn::members", mutates_args=())
def _members(labels: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    b, h, n = labels.shape
    return kernels.by_label(labels.reshape(b * h, n), clusters)


@_members.register_fake
def _(labels: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    lead = labels.shape[0] * labels.shape[1]
    return (
        labels.new_empty((lead, labels.shape[2]), dtype=torch.int32),
        labels.new_empty((lead, clusters + 2), dtype=torch.int32),
    )


def members(labels: Tensor, clusters: int, q: Tensor, *, backend: str = "reference") -> Members | None:
    """labels (b h n) of queries q, -1 for nobody's. None where no kernel will ask for it."""
    reason = "there is nothing to launch for an empty tensor" if 0 in labels.shape or not clusters else None
    if clusters > 8190:
        reason = f"kernels count up to 8190 clusters, there are {clusters}"
    return Members(*_members(labels, clusters)) if use_kernel("members", backend, reason or why_no_kernels(q)) else None
