"""Keys beside their values as the points of one space.

Keys are told apart as the queries of a cluster do: by their products with some differences of queries from their
centroids. Products and values are scaled to a spread of one, and taken off is what all share (the row of one key): it
says nothing about who is alike, and costs digits in half precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._chunks import wide
from ..kmeans.reference import rows_at
from ..rows import broadcast


def _spread(x: Tensor, at: Tensor) -> Tensor:
    """The standard deviation of rows x (b h s w), those with at >= 0, as one number for all columns: (b h 1 1)."""
    real = (at >= 0).unsqueeze(-1)
    total = real.sum(2, keepdim=True).clamp(min=1)
    apart = (x - (x * real).sum(2, keepdim=True) / total) * real
    size = (apart.square().sum((2, 3), keepdim=True) / total).sqrt()
    return torch.where(size > 0, size, 1.0)


def beside(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor, labels: Tensor, queries_at: Tensor, keys_at: Tensor
) -> Tensor:
    (b, hk, m, d) = k.shape
    theirs = torch.where(queries_at >= 0, labels.gather(2, queries_at.clamp(min=0)), -1)
    apart = (wide(rows_at(q, queries_at)) - wide(broadcast(means, theirs))) * (theirs >= 0).unsqueeze(-1)
    view = apart.reshape(b, hk, q.shape[1] // hk * apart.shape[2], d).mT  # (b hk d r)
    key_centre, value_centre = (wide(rows_at(x, keys_at[..., :1])) for x in (k, v))
    view = (view / _spread((wide(rows_at(k, keys_at)) - key_centre) @ view, keys_at)).to(k.dtype)
    shrink = _spread(wide(rows_at(v, keys_at)) - value_centre, keys_at)
    # the centre is taken off before the product is rounded
    offset = -(key_centre.to(k.dtype) @ view).flatten(0, 1)
    seen = torch.baddbmm(offset, k.flatten(0, 1), view.flatten(0, 1)).view(b, hk, m, view.shape[-1])
    return torch.cat([seen, (v - value_centre.to(v.dtype)) / shrink.to(v.dtype)], -1)
