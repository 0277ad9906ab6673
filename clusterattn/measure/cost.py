"""What attention costs in multiply-adds, grouping included, at the lengths that a model really meets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from .._types import Method
from ..methods import Clustered, Exact, OracleTop


@dataclass(frozen=True)
class Shape:
    """One sequence in one layer: what the cost of a head follows from."""

    n: int
    m: int
    d: int
    e: int
    causal: bool = False


def multiply_adds(method: Method, at: Shape) -> float:
    """Of one head. ``Method.cost`` counts a full n × m; causal attention needs less, and its methods work otherwise."""
    n, m, d, e = at.n, at.m, at.d, at.e
    if n < 1 or m < 1:
        return 0.0
    if not at.causal:
        return float(method.cost(n, m, d, e))
    seen = sum(min(m, max(i + 1 + m - n, 0)) for i in range(n))  # pairs that a causal mask leaves
    if isinstance(method, Exact):
        return float(seen * (d + e))
    if isinstance(method, OracleTop):
        return float(method.cost(n, m, d, e) - (n * m - seen) * d)
    if isinstance(method, Clustered):
        return _by_blocks(method, at)
    return float(method.cost(n, m, d, e))


def _by_blocks(method: Clustered, at: Shape) -> float:
    """A block attends to itself in full and to all keys before it through centroids; the first one to its whole past.
    The covariance of the keys before a block continues that of the block before, so each key enters it once."""
    n, d, e, block, before = at.n, at.d, at.e, method.block, at.m - at.n
    total = min(n, block) * max(before, 0) * (d + e)
    for start in range(0, n, block):
        size = min(block, n - start)
        total += size * size * (d + e)
        keys = before + start
        if start == 0 or keys < 1:
            continue
        total += method.cost(size, keys, d, e)
        if method.metric == "keys":
            total -= max(keys - block, 0) * d * d
        if method.centroids_from == "past":  # they were grouped by other queries, so these are seen and assigned again
            width = method.width(d)
            total += size * min(method.clusters, block) * width
            if method.metric == "hamming" or width < d:
                total += size * d * width
    return float(total)


def shapes(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, causal: bool
) -> list[Shape]:
    """One for each sequence of a batch, at its real lengths."""
    (b, _, n, d), m, e = q.shape, k.shape[2], v.shape[3]
    queries = [n] * b if query_mask is None else query_mask.sum(-1).tolist()
    keys = [m] * b if key_mask is None else key_mask.sum(-1).tolist()
    return [Shape(int(mine), int(theirs), d, e, causal) for mine, theirs in zip(queries, keys, strict=True)]


def of_layer(methods: Method | Iterable[Method], heads: int, at: Iterable[Shape], exact_below: int = 0) -> float:
    """Of one layer for these sequences: one method for all heads, or one for each."""
    each = [methods] * heads if isinstance(methods, Method) else list(methods)
    kinds = {method: each.count(method) for method in each}
    total = 0.0
    for shape in at:
        short = min(shape.n, shape.m) < exact_below
        total += sum(count * multiply_adds(Exact() if short else kind, shape) for kind, count in kinds.items())
    return total
