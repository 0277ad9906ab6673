"""bucketed: attention inside each bucket; a token in several buckets merges its answers by lse.

Behind a torch.library op with its backward written by hand: the loop over buckets stays out of compiled graphs (one
graph serves every length), and what is kept for backward is q, k, v, out and lse, whatever the number of rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor

from ..._types import Attended, Buckets, Mask
from .. import _backends, tables
from .._op import op
from ..rows import take


@op("bucketed")
def _bucketed(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], queries: Tensor, keys: Tensor,
    low: Optional[Tensor], high: Optional[Tensor], rank: Optional[Tensor], key_mask: Optional[Tensor],
    scale: float, less: float, numbers: Sequence[int], backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse, and who looked at itself. numbers: see Seating.of."""
    from .reference import Seating

    seating = Seating.of(bias, queries, keys, low, high, rank, scale, less, numbers)
    found: tuple[Tensor, Tensor, Tensor] = _backends.function("bucketed", backend)(q, k, v, seating, key_mask)
    return found


@_bucketed.fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], queries: Tensor, keys: Tensor,
    low: Optional[Tensor], high: Optional[Tensor], rank: Optional[Tensor], key_mask: Optional[Tensor],
    scale: float, less: float, numbers: Sequence[int], backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (b, h, n, _), acc = q.shape, torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_empty((b, h, n, v.shape[3]), dtype=v.dtype if _backends.keeps_dtype(backend) else acc),
        q.new_empty((b, h, n), dtype=acc),
        q.new_empty((b, h, n if numbers[-1] else 0), dtype=torch.int8),
    )


@op("bucketed_backward")
def _bucketed_backward(
    d_out: Tensor, d_lse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, alone: Tensor,
    bias: Optional[Tensor], queries: Tensor, keys: Tensor,
    low: Optional[Tensor], high: Optional[Tensor], rank: Optional[Tensor],
    scale: float, less: float, numbers: Sequence[int], backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from .reference import Seating

    seating = Seating.of(bias, queries, keys, low, high, rank, scale, less, numbers)
    run = _backends.backward("bucketed", backend)
    dq, dk, dv, d_bias = run(d_out, d_lse, q, k, v, out, lse, alone, seating)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_bias


@_bucketed_backward.fake
def _(
    d_out: Tensor, d_lse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, alone: Tensor,
    bias: Optional[Tensor], *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_bias = q.new_empty((q.shape[0], q.shape[1], k.shape[2] if bias is not None else 0), dtype=lse.dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.settings = inputs[10:]
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:9])


def _give_back(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: None) -> tuple[Any, ...]:
    if d_out is None and d_lse is None:
        return ()
    saved = ctx.saved_tensors  # once: a checkpoint unpacks them only once
    d_out = torch.zeros_like(saved[3]) if d_out is None else d_out
    dq, dk, dv, d_bias = _bucketed_backward(d_out, d_lse, *saved, *ctx.settings)
    return dq, dk, dv, d_bias if saved[6] is not None else None


_bucketed.gradient(_give_back, _keep)


@_bucketed.flops
def _(q: Any, k: Any, v: Any, bias: Any, queries: Any, keys: Any, *_: Any) -> int:
    b, h, g, s = queries
    return int(2 * b * h * g * s * keys[3] * (q[3] + v[3]))


@_bucketed_backward.flops
def _(d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, alone: Any, bias: Any, *tables: Any) -> int:
    (b, h, g, s), keys = tables[:2]
    return int(2 * b * h * g * s * keys[3] * (3 * q[3] + 2 * v[3]))


def bucketed(
    q: Tensor, k: Tensor, v: Tensor, buckets: Buckets, mask: Mask, scale: float, *,
    bias: Tensor | None = None, meetings: tuple[Tensor, Tensor, Tensor] | None = None,
    left: int = -1, right: int = -1, others: bool = False, or_self: bool = False, less: float = 0.0,
    backend: str = "reference",
) -> Attended:  # fmt: skip
    """Queries of each bucket attend to its keys, as far as the mask lets them.

    bias (b h m) is added to a key's logits; ``meetings`` makes a pair count once over all rounds (see reference.py);
    ``left``/``right`` bound the distance between positions; ``others``: a query does not see itself; ``less`` is taken
    off the log-weights; ``or_self``: a query that met nobody attends to the key at its own position, where that key is
    real.
    """
    if mask.causal:
        right = 0
    low, high, rank = meetings if meetings is not None else (None, None, None)
    keys = tables.hide(buckets.keys, mask.keys)
    name = _backends.serving("bucketed", backend, q, k, v, buckets.queries, keys)
    # the kernel that joins rounds does the rest as well
    joined = name != _backends.REFERENCE and buckets.rounds > (0 if or_self else 1)
    numbers = (mask.offset, left, right, int(others), buckets.rounds, buckets.copies, int(or_self and joined))
    out, lse, _ = _bucketed(
        q, k, v, bias, buckets.queries, keys, low, high, rank, mask.keys if or_self and joined else None,
        scale, less if joined else 0.0, numbers, name,
    )  # fmt: skip
    if joined:
        return Attended(out, lse)
    answer = Attended(out, lse - less if less else lse)
    return itself_at_least(answer, q, k, v, mask, scale, backend=backend) if or_self else answer


def itself_at_least(
    answer: Attended, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, *, backend: str = "reference"
) -> Attended:
    """A query that met no key it may see attends to the key at its own position, where that key is real."""
    from . import reference

    return reference.or_self(answer, q, k, v, mask, scale, partial(take, backend=backend))
