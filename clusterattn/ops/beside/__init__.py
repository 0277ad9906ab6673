"""beside: keys beside their values as the points of one space, for k-means to cut into parts."""

from __future__ import annotations

from torch import Tensor

from .. import _backends
from .._op import op


@op("beside")
def _beside(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor, labels: Tensor, queries_at: Tensor, keys_at: Tensor, backend: str
) -> Tensor:
    points: Tensor = _backends.function("beside", backend)(q, k, v, means, labels, queries_at, keys_at)
    return points


@_beside.fake
def _(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor, labels: Tensor, queries_at: Tensor, keys_at: Tensor, backend: str
) -> Tensor:
    seen = queries_at.shape[2] * (q.shape[1] // k.shape[1])
    return k.new_empty((*k.shape[:3], seen + v.shape[3]))


def beside(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor, labels: Tensor, queries_at: Tensor, keys_at: Tensor, *,
    backend: str = "reference",
) -> Tensor:  # fmt: skip
    """Points (b hk m r+e) in the dtype of k: products of the keys k (b hk m d) with differences of the queries at
    queries_at (b h s) from the means (b h c d) of their clusters (labels, b h n), r of them over the query heads of a
    key head; and the values v (b hk m e). Either side has a spread of one over the keys at keys_at (b hk s); positions
    of -1 are nobody's. Without gradient."""
    name = _backends.serving("beside", backend, k, v, queries_at)
    points: Tensor = _beside(q, k, v, means, labels, queries_at, keys_at, name)
    return points
