"""hashing: random numbers that are near for tokens that are alike, and seats in the order of those numbers.

Nothing here has a gradient but ``unit``. The references are plain torch; what a kernel serves goes through
torch.library ops, inside which sizes are known: a compiled graph serves every length.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import _backends, draw
from .._backends import REFERENCE, serving
from .._op import op


@op("scores")
def _scores(
    q: Tensor, k: Tensor, drawn: Tensor, valid_q: Optional[Tensor], valid_k: Optional[Tensor],
    lifted: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    found: tuple[Tensor, Tensor] = _backends.function("scores", backend)(q, k, drawn, valid_q, valid_k, lifted)
    return found


@_scores.fake
def _(q: Tensor, k: Tensor, drawn: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    (b, h, n, _d), r = q.shape, drawn.shape[0]
    return drawn.new_empty((b, h, r, n)), drawn.new_empty((b, h, r, k.shape[2]))


@op("polytope")
def _polytope(x: Tensor, drawn: Tensor, buckets: Optional[Tensor], backend: str) -> Tensor:
    hashes: Tensor = _backends.function("polytope", backend)(x, drawn, buckets)
    return hashes


@_polytope.fake
def _(x: Tensor, drawn: Tensor, buckets: Optional[Tensor], backend: str) -> Tensor:
    return x.new_empty((*x.shape[:2], drawn.shape[0], x.shape[2]), dtype=torch.int32)


@op("balanced")
def _balanced(
    score_q: Tensor, score_k: Tensor, valid_q: Optional[Tensor], valid_k: Optional[Tensor], q_seats: int, k_seats: int,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    run = _backends.function("balanced", backend)
    seats: tuple[Tensor, Tensor] = run(score_q, score_k, valid_q, valid_k, q_seats, k_seats)
    return seats


@_balanced.fake
def _(
    score_q: Tensor, score_k: Tensor, valid_q: Optional[Tensor], valid_k: Optional[Tensor], q_seats: int, k_seats: int,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (b, h, r, n), m = score_q.shape, score_k.shape[3]
    most = max(-(-n // q_seats), -(-m // k_seats), 1)
    return (
        score_q.new_empty((b, h, r * most, min(q_seats, n)), dtype=torch.int64),
        score_q.new_empty((b, h, r * most, min(k_seats, m)), dtype=torch.int64),
    )


@op("chunked")
def _chunked(hashes: Tensor, valid: Optional[Tensor], chunk: int, backend: str) -> tuple[Tensor, Tensor]:
    seats: tuple[Tensor, Tensor] = _backends.function("chunked", backend)(hashes, valid, chunk)
    return seats


@_chunked.fake
def _(hashes: Tensor, valid: Optional[Tensor], chunk: int, backend: str) -> tuple[Tensor, Tensor]:
    b, h, r, n = hashes.shape
    g = r * max(-(-n // chunk), 1)
    return (
        hashes.new_empty((b, h, g, chunk), dtype=torch.int64),
        hashes.new_empty((b, h, g, 2 * chunk), dtype=torch.int64),
    )


@op("unit")
def _unit(x: Tensor, backend: str) -> Tensor:
    rows: Tensor = _backends.function("unit", backend)(x)
    return rows


@_unit.fake
def _(x: Tensor, backend: str) -> Tensor:
    return x.new_empty(x.shape)


@op("unit_backward")
def _unit_backward(d_unit: Tensor, x: Tensor, backend: str) -> Tensor:
    found: Tensor = _backends.backward("unit", backend)(d_unit, x)
    return found


@_unit_backward.fake
def _(d_unit: Tensor, x: Tensor, backend: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    x, ctx.backend = inputs
    ctx.save_for_backward(x)


def _give_back(ctx: Any, d_unit: Tensor | None) -> Any:
    return None if d_unit is None else _unit_backward(d_unit, *ctx.saved_tensors, ctx.backend)


_unit.gradient(_give_back, _keep)


def directions(rounds: int, each: int, d: int, seed: draw.Seed, like: Tensor, *, backend: str = "reference") -> Tensor:
    """(r each d) random directions in fp32 or better; those of one round do not depend on how many there are. Draws are
    the same whoever serves."""
    drawn = draw.normals(rounds, each * d, seed, draw.STREAM_ROUNDS, like).view(rounds, each, d)
    return drawn.double() if like.dtype == torch.float64 else drawn


def scores(
    q: Tensor, k: Tensor, drawn: Tensor, valid_q: Tensor | None, valid_k: Tensor | None, *,
    lifted: bool, backend: str = "reference",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Projections of q (b h n d) and k (b hk m d) on drawn (r d+2): (b h r n) and (b h r m).

    ``lifted``: after two more coordinates have brought all queries and keys of a head to one norm, so that near means a
    large product. valid (b n), None for everybody: padding has no say in the norm.
    """
    name = serving("scores", backend, q, k)
    if name != REFERENCE:
        found: tuple[Tensor, Tensor] = _scores(q, k, drawn, valid_q, valid_k, lifted, name)
        return found
    from . import reference

    return reference.scores(q, k, drawn, valid_q, valid_k, lifted)


def lifts(
    q: Tensor, k: Tensor, valid_q: Tensor | None, valid_k: Tensor | None, *, backend: str = "reference"
) -> tuple[Tensor, Tensor]:
    """The extra coordinate of each query (b h n) and key (b h m) that brings all of a head to one norm; see scores."""
    from . import reference

    return reference.lifts(q, k, valid_q, valid_k)


def polytope(x: Tensor, drawn: Tensor, buckets: Tensor | None = None, *, backend: str = "reference") -> Tensor:
    """Cross-polytope hash: the nearest of ``buckets`` (b 1) random directions, taken with both signs, for each round.

    x (b h n d), drawn (r directions d) -> (b h r n). With fewer valid tokens fewer directions take part, so that
    padding does not change a hash; None: all of them.
    """
    name = serving("polytope", backend, x)
    if name != REFERENCE:
        hashes: Tensor = _polytope(x, drawn, buckets, name)
        return hashes
    from . import reference

    return reference.polytope(x, drawn, buckets)


def balanced(
    score_q: Tensor, score_k: Tensor, valid_q: Tensor | None, valid_k: Tensor | None, *,
    q_seats: int, k_seats: int, backend: str = "reference",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and keys in the order of their scores (b h r n), (b h r m), cut into equally many buckets of nearly equal
    size: two tables (b h r*g seats). The side that needs more buckets decides; the other spreads evenly over them."""
    name = serving("balanced", backend, score_q[..., :1], score_k[..., :1])
    if name != REFERENCE:
        seats: tuple[Tensor, Tensor] = _balanced(score_q, score_k, valid_q, valid_k, q_seats, k_seats, name)
        return seats
    from . import reference

    return reference.balanced(score_q, score_k, valid_q, valid_k, q_seats, k_seats)


def chunked(hashes: Tensor, valid: Tensor | None, *, chunk: int, backend: str = "reference") -> tuple[Tensor, Tensor]:
    """Tokens in the order of their hashes (b h r n), cut into chunks: the chunks (b h r*g chunk), and each chunk with
    the one before it, around the circle of its round (b h r*g 2*chunk)."""
    name = serving("chunked", backend, hashes[..., :1])
    if name != REFERENCE:
        seats: tuple[Tensor, Tensor] = _chunked(hashes, valid, chunk, name)
        return seats
    from . import reference

    return reference.chunked(hashes, valid, chunk)


def unit(x: Tensor, *, backend: str = "reference") -> Tensor:
    """Rows of length 1, in x's own dtype."""
    name = serving("unit", backend, x)
    from . import reference

    rows: Tensor = reference.unit(x) if name == REFERENCE else _unit(x, name)
    return rows
