"""beside: keys beside their values as the points of one space, for k-means to cut into parts."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _backends
from .._op import op


@op("beside")
def _beside(k: Tensor, v: Tensor, view: Tensor, key_centre: Tensor, value_centre: Tensor, shrink: Tensor) -> Tensor:
    found: Tensor = _backends.function("beside", "triton")(k, v, view, key_centre, value_centre, shrink)
    return found


@_beside.fake
def _(k: Tensor, v: Tensor, view: Tensor, key_centre: Tensor, value_centre: Tensor, shrink: Tensor) -> Tensor:
    return k.new_empty((*k.shape[:3], view.shape[3] + v.shape[3]))


def beside(
    k: Tensor, v: Tensor, view: Tensor, key_centre: Tensor, value_centre: Tensor, shrink: Tensor, *,
    backend: str = "reference",
) -> Tensor:  # fmt: skip
    """``[(k - its centre) view, (v - its centre) / shrink]``: k (b hk m d), v (b hk m e), view (b hk d r), centres
    (b hk 1 ...), shrink (b hk 1 1) -> (b hk m r+e), in the dtype of k. Without gradient."""
    if _backends.serving("beside", backend, k, v, view) != _backends.REFERENCE:
        points: Tensor = _beside(k, v, view, key_centre, value_centre, shrink)
        return points
    b, hk, m, _ = k.shape
    view = view.to(k.dtype)
    # the centre is taken off before the product is rounded
    offset = -(key_centre.to(k.dtype) @ view).flatten(0, 1)
    seen = torch.baddbmm(offset, k.flatten(0, 1), view.flatten(0, 1)).view(b, hk, m, -1)
    return torch.cat([seen, (v - value_centre.to(v.dtype)) / shrink.to(v.dtype)], -1)
