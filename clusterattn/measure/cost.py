"""What attention costs in multiply-adds at the lengths that a model really meets; ``Method.cost`` is the accountant."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .._types import Method
from ..methods import Exact
from ..methods.budgets import Shape

__all__ = ["Shape", "multiply_adds", "of_layer", "shapes", "share"]


def multiply_adds(method: Method, at: Shape) -> int:
    """Of one query head."""
    return method.cost(at.n, at.m, at.d, at.e, causal=at.causal, group=at.group)


def share(method: Method, at: Shape) -> float:
    """Of exact attention's multiply-adds."""
    return multiply_adds(method, at) / max(multiply_adds(Exact(), at), 1)


def shapes(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, causal: bool
) -> list[Shape]:
    """One for each sequence of a batch, at its real lengths."""
    (b, h, n, d), (hk, m), e = q.shape, k.shape[1:3], v.shape[3]
    queries = [n] * b if query_mask is None else query_mask.sum(-1).tolist()
    keys = [m] * b if key_mask is None else key_mask.sum(-1).tolist()
    both = zip(queries, keys, strict=True)
    return [Shape(int(mine), int(theirs), d, e, causal, h // hk) for mine, theirs in both]


def of_layer(methods: Method | Iterable[Method], heads: int, at: Iterable[Shape], exact_below: int = 0) -> int:
    """Of one layer for these sequences: one method for all heads, or one for each."""
    each = [methods] * heads if isinstance(methods, Method) else list(methods)
    kinds = {method: each.count(method) for method in each}
    total = 0
    for shape in at:
        short = min(shape.n, shape.m) < exact_below
        total += sum(count * multiply_adds(Exact() if short else kind, shape) for kind, count in kinds.items())
    return total
