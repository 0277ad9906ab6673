"""hashing: random numbers that are near for tokens that are alike, and seats in the order of those numbers.

Nothing here has a gradient but ``unit``. The references are plain torch; what a kernel serves goes through
torch.library ops, inside which sizes are known: a compiled graph serves every length.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import draw
from .._chunks import wide
from .._jit import use_kernel, why_no_kernels
from . import kernels, reference


@torch.library.custom_op("clusterattn::directions", mutates_args=())
def _directions(like: Tensor, rounds: int, each: int, d: int, number: int, holder: Optional[Tensor] = None) -> Tensor:
    return kernels.directions(rounds, each, d, number, like.device, holder)


@_directions.register_fake
def _(like: Tensor, rounds: int, each: int, d: int, number: int, holder: Optional[Tensor] = None) -> Tensor:
    return like.new_empty((rounds, each, d), dtype=torch.float32)


@torch.library.custom_op("clusterattn::scores", mutates_args=())
def _scores(
    q: Tensor, k: Tensor, drawn: Tensor, valid_q: Optional[Tensor], valid_k: Optional[Tensor], lifted: bool
) -> tuple[Tensor, Tensor]:
    return kernels.scores(q, k, drawn, valid_q, valid_k, lifted)


@_scores.register_fake
def _(q: Tensor, k: Tensor, drawn: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    (b, h, n, _d), r = q.shape, drawn.shape[0]
    return drawn.new_empty((b, h, r, n)), drawn.new_empty((b, h, r, k.shape[2]))


@torch.library.custom_op("clusterattn::polytope", mutates_args=())
def _polytope(x: Tensor, drawn: Tensor, buckets: Optional[Tensor]) -> Tensor:
    return kernels.polytope(x, drawn, buckets)


@_polytope.register_fake
def _(x: Tensor, drawn: Tensor, buckets: Optional[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:2], drawn.shape[0], x.shape[2]), dtype=torch.int32)


@torch.library.custom_op("clusterattn::balanced", mutates_args=())
def _balanced(
    score_q: Tensor, score_k: Tensor, valid_q: Optional[Tensor], valid_k: Optional[Tensor], q_seats: int, k_seats: int
) -> tuple[Tensor, Tensor]:
    return kernels.balanced(score_q, score_k, valid_q, valid_k, q_seats, k_seats)


@_balanced.register_fake
def _(
    score_q: Tensor, score_k: Tensor, valid_q: Optional[Tensor], valid_k: Optional[Tensor], q_seats: int, k_seats: int
) -> tuple[Tensor, Tensor]:
    (b, h, r, n), m = score_q.shape, score_k.shape[3]
    most = max(-(-n // q_seats), -(-m // k_seats), 1)
    return (
        score_q.new_empty((b, h, r * most, min(q_seats, n)), dtype=torch.int64),
        score_q.new_empty((b, h, r * most, min(k_seats, m)), dtype=torch.int64),
    )


@torch.library.custom_op("clusterattn::chunked", mutates_args=())
def _chunked(hashes: Tensor, valid: Optional[Tensor], chunk: int) -> tuple[Tensor, Tensor]:
    return kernels.chunked(hashes, valid, chunk)


@_chunked.register_fake
def _(hashes: Tensor, valid: Optional[Tensor], chunk: int) -> tuple[Tensor, Tensor]:
    b, h, r, n = hashes.shape
    g = r * max(-(-n // chunk), 1)
    return (
        hashes.new_empty((b, h, g, chunk), dtype=torch.int64),
        hashes.new_empty((b, h, g, 2 * chunk), dtype=torch.int64),
    )


@torch.library.custom_op("clusterattn::unit", mutates_args=())
def _unit(x: Tensor) -> Tensor:
    return kernels.unit(x)


@_unit.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("clusterattn::unit_backward", mutates_args=())
def _unit_backward(d_unit: Tensor, x: Tensor) -> Tensor:
    return kernels.unit_backward(d_unit, x)


@_unit_backward.register_fake
def _(d_unit: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _give_back(ctx: Any, d_unit: Tensor) -> Any:
    return _unit_backward(d_unit, *ctx.saved_tensors)


_unit.register_autograd(_give_back, setup_context=_keep)


def directions(rounds: int, each: int, d: int, seed: draw.Seed, like: Tensor, *, backend: str = "reference") -> Tensor:
    """(r each d) random directions in fp32 or better; those of one round do not depend on how many there are."""
    if use_kernel("directions", backend, why_no_kernels(like)):
        number, holder = draw.number_and_holder(seed)
        drawn: Tensor = _directions(like, rounds, each, d, number, holder)
        return drawn
    return draw.directions(rounds, each, d, seed, wide(like.new_empty(0)))


def scores(
    q: Tensor, k: Tensor, drawn: Tensor, valid_q: Tensor | None, valid_k: Tensor | None, *,
    lifted: bool, backend: str = "reference",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Projections of q (b h n d) and k (b hk m d) on drawn (r d+2): (b h r n) and (b h r m).

    ``lifted``: after two more coordinates have brought all queries and keys of a head to one norm, so that near means a
    large product. valid (b n), None for everybody: padding has no say in the norm.
    """
    if use_kernel("scores", backend, kernels.why_not(q, k)):
        found: tuple[Tensor, Tensor] = _scores(q, k, drawn, valid_q, valid_k, lifted)
        return found
    return reference.scores(q, k, drawn, valid_q, valid_k, lifted)


def polytope(x: Tensor, drawn: Tensor, buckets: Tensor | None = None, *, backend: str = "reference") -> Tensor:
    """Cross-polytope hash: the nearest of ``buckets`` (b 1) random directions, taken with both signs, for each round.

    x (b h n d), drawn (r directions d) -> (b h r n). With fewer valid tokens fewer directions take part, so that
    padding does not change a hash; None: all of them.
    """
    if use_kernel("polytope", backend, kernels.why_not(x)):
        hashes: Tensor = _polytope(x, drawn, buckets)
        return hashes
    return reference.polytope(x, drawn, buckets)


def balanced(
    score_q: Tensor, score_k: Tensor, valid_q: Tensor | None, valid_k: Tensor | None, *,
    q_seats: int, k_seats: int, backend: str = "reference",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and keys in the order of their scores (b h r n), (b h r m), cut into equally many buckets of nearly equal
    size: two tables (b h r*g seats). The side that needs more buckets decides; the other spreads evenly over them."""
    if use_kernel("balanced", backend, kernels.why_not(score_q[..., :1], score_k[..., :1])):
        seats: tuple[Tensor, Tensor] = _balanced(score_q, score_k, valid_q, valid_k, q_seats, k_seats)
        return seats
    return reference.balanced(score_q, score_k, valid_q, valid_k, q_seats, k_seats)


def chunked(hashes: Tensor, valid: Tensor | None, *, chunk: int, backend: str = "reference") -> tuple[Tensor, Tensor]:
    """Tokens in the order of their hashes (b h r n), cut into chunks: the chunks (b h r*g chunk), and each chunk with
    the one before it, around the circle of its round (b h r*g 2*chunk)."""
    if use_kernel("chunked", backend, kernels.why_not(hashes[..., :1])):
        seats: tuple[Tensor, Tensor] = _chunked(hashes, valid, chunk)
        return seats
    return reference.chunked(hashes, valid, chunk)


def unit(x: Tensor, *, backend: str = "reference") -> Tensor:
    """Rows of length 1, in x's own dtype."""
    rows: Tensor = _unit(x) if use_kernel("unit", backend, kernels.why_not(x)) else reference.unit(x)
    return rows
