"""beside: keys beside their values as the points of one space, for k-means to cut into parts.

What they are seen by, ``view``; the points themselves, ``beside``; and the nearest centre of every key, for which no
point need be written, ``nearest_beside``. All without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from .. import _backends
from .._op import op
from ..kmeans import Centres

EVERY = 4  # of the keys that tell the spread so many tell as well which start is nearest: one of four


@dataclass(frozen=True)
class View:
    """What keys and values are seen by."""

    directions: Tensor  # (b hk r d), in the dtype of the keys
    centres: Tensor  # (b hk d+e+1): what is taken off keys and values, and the spread of the values


@op("view")
def _view(
    q: Tensor, k: Tensor, v: Tensor, means: Optional[Tensor], labels: Optional[Tensor], starts_at: Optional[Tensor],
    queries_at: Tensor, keys_at: Tensor, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    run = _backends.function("view", backend)
    seen: tuple[Tensor, Tensor] = run(q, k, v, means, labels, starts_at, queries_at, keys_at)
    return seen


@_view.fake
def _(
    q: Tensor, k: Tensor, v: Tensor, means: Optional[Tensor], labels: Optional[Tensor], starts_at: Optional[Tensor],
    queries_at: Tensor, keys_at: Tensor, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (b, hk, _, d), ways = k.shape, queries_at.shape[2] * (q.shape[1] // k.shape[1])
    acc = torch.promote_types(k.dtype, torch.float32)
    return k.new_empty((b, hk, ways, d)), k.new_empty((b, hk, d + v.shape[3] + 1), dtype=acc)


@op("beside")
def _beside(
    k: Tensor, v: Tensor, directions: Tensor, centres: Tensor, first_at: Optional[Tensor], second_at: Optional[Tensor],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    run = _backends.function("beside", backend)
    points: tuple[Tensor, Tensor, Tensor] = run(k, v, directions, centres, first_at, second_at)
    return points


@_beside.fake
def _(
    k: Tensor, v: Tensor, directions: Tensor, centres: Tensor, first_at: Optional[Tensor], second_at: Optional[Tensor],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (b, hk, m, _), many = k.shape, [0 if at is None else at.shape[2] for at in (first_at, second_at)]
    points = k.new_empty((b, hk, m if first_at is None else sum(many), directions.shape[2] + v.shape[3]))
    first, second = (k.new_empty((b, hk, each), dtype=torch.int64) for each in many)
    return points, first, second


@_beside.flops
def _(k: Any, v: Any, directions: Any, centres: Any, first_at: Any, second_at: Any, backend: str) -> int:
    b, hk, m, d = k
    many = m if first_at is None else sum(at[2] for at in (first_at, second_at) if at is not None)
    return int(2 * b * hk * many * directions[2] * d)


@op("nearest_beside")
def _nearest_beside(
    k: Tensor, v: Tensor, directions: Tensor, centres: Tensor, right: Tensor, offset: Tensor, origin: Tensor,
    backend: str,
) -> Tensor:  # fmt: skip
    run = _backends.function("nearest_beside", backend)
    found: Tensor = run(k, v, directions, centres, right, offset, origin)
    return found


@_nearest_beside.fake
def _(
    k: Tensor, v: Tensor, directions: Tensor, centres: Tensor, right: Tensor, offset: Tensor, origin: Tensor,
    backend: str,
) -> Tensor:  # fmt: skip
    return k.new_empty((right.shape[0], k.shape[2]), dtype=torch.int64)


@_nearest_beside.flops
def _(k: Any, v: Any, directions: Any, centres: Any, right: Any, *_: Any) -> int:
    b, hk, m, d = k
    return int(2 * b * hk * m * (directions[2] * d + right[1] * right[2]))


def view(
    q: Tensor, k: Tensor, v: Tensor, queries_at: Tensor, keys_at: Tensor, *,
    means: Tensor | None = None, labels: Tensor | None = None, starts_at: Tensor | None = None,
    backend: str = "reference",
) -> View:  # fmt: skip
    """What keys k (b hk m d) and values v (b hk m e) are seen by: differences of the queries at queries_at (b h s) from
    the means (b h c d) of their clusters (labels, b h n) or, given starts_at (b h c), each from that query among those
    which is nearest as the keys see it; r of them over the query heads of a key head. Either side gets a spread of one
    over the keys at keys_at (b hk s); positions of -1 are nobody's."""
    name = _backends.serving("view", backend, k, v, queries_at)
    return View(*_view(q, k, v, means, labels, starts_at, queries_at, keys_at, name))


def beside(
    k: Tensor, v: Tensor, seen: View, first_at: Tensor | None = None, second_at: Tensor | None = None, *,
    backend: str = "reference",
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Points in the dtype of k (b hk s r+e): products of keys with the directions they are seen by, and values.

    Of all keys, or of those at first_at (b hk s) and then those at second_at (b hk t); both come back as positions
    among these points. -1 stays -1, and what stands there is nobody's.
    """
    name = _backends.serving("beside", backend, k, v, seen.directions)
    points, first, second = _beside(k, v, seen.directions, seen.centres, first_at, second_at, name)
    return points, None if first_at is None else first, None if second_at is None else second


def nearest_beside(k: Tensor, v: Tensor, seen: View, found: Centres, *, backend: str = "reference") -> Tensor:
    """The best of the centres for the point of every key (b hk m); ties go to the lowest index."""
    assert found.origin is not None
    lead = found.right.shape[:2]
    name = _backends.serving("nearest_beside", backend, k, v, seen.directions)
    flat: Tensor = _nearest_beside(
        k, v, seen.directions, seen.centres, found.right.flatten(0, 1), found.offset.flatten(0, 1),
        found.origin.flatten(0, 1), name,
    )  # fmt: skip
    return flat.view(*lead, k.shape[2])
