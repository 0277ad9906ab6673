"""Sizes from shapes: what is right at 512 tokens is wrong at 60 000."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .refined import Refined


@dataclass(frozen=True)
class Shape:
    """Of a call: n queries, m keys, dimensions d of keys and e of values, query heads that share a key head."""

    n: int
    m: int
    d: int
    e: int
    causal: bool = False
    group: int = 1


def block(n: int, clusters: int) -> int:
    """Causal blocks: within a block everybody is seen exactly, before it through centroids. n * block against
    n / block * clusters * n multiply-adds are least where they are equal."""
    best = isqrt(2 * max(clusters, 1) * max(n, 1))
    return max(64, 1 << (best.bit_length() - 1))


def fill(method: Refined, given: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """A value for every size, those that are given among them."""
    chosen = {"clusters": 100, "top": 32, "parts": 1, "slope": False, "steps": 5}
    return {**chosen, **given}
