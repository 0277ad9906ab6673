"""bucketed: attention inside each bucket; a token in several buckets merges its answers by lse.

Behind a torch.library op with its backward written by hand: the loop over buckets stays out of compiled graphs (one graph
serves every length), and what is kept for backward is q, k, v, out and lse, whatever the number of rounds.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ..._types import Attended, Buckets, Mask
from .. import tables
from . import reference


@torch.library.custom_op("clusterattn::bucketed", mutates_args=())
def _bucketed(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], queries: Tensor, keys: Tensor,
    low: Optional[Tensor], high: Optional[Tensor], rank: Optional[Tensor],
    scale: float, offset: int, left: int, right: int, others: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    how = reference.Seating(queries, keys, bias, low, high, rank, scale, offset, left, right, others)
    return reference.forward(q, k, v, how)


@_bucketed.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    acc = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3]), dtype=acc), q.new_empty(q.shape[:3], dtype=acc)


@torch.library.custom_op("clusterattn::bucketed_backward", mutates_args=())
def _bucketed_backward(
    d_out: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Optional[Tensor],
    queries: Tensor, keys: Tensor, low: Optional[Tensor], high: Optional[Tensor], rank: Optional[Tensor],
    scale: float, offset: int, left: int, right: int, others: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    how = reference.Seating(queries, keys, bias, low, high, rank, scale, offset, left, right, others)
    return reference.backward(d_out, d_lse, q, k, v, out, lse, how)


@_bucketed_backward.register_fake
def _(
    d_out: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Optional[Tensor], *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, h, m = q.shape[0], q.shape[1], k.shape[2]
    d_bias = (b, h, m if bias is not None else 0)
    return (
        q.new_empty(q.shape, dtype=lse.dtype), k.new_empty(k.shape, dtype=lse.dtype),
        v.new_empty(v.shape, dtype=lse.dtype), q.new_empty(d_bias, dtype=lse.dtype),
    )  # fmt: skip


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, queries, keys, low, high, rank, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, *output, bias, queries, keys, low, high, rank)


def _give_back(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, bias, *seating = ctx.saved_tensors
    dq, dk, dv, d_bias = _bucketed_backward(d_out, d_lse, q, k, v, out, lse, bias, *seating, *ctx.how)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_bias if bias is not None else None, *[None] * 10


_bucketed.register_autograd(_give_back, setup_context=_keep)


def bucketed(
    q: Tensor, k: Tensor, v: Tensor, buckets: Buckets, mask: Mask, scale: float, *,
    bias: Tensor | None = None, meetings: tuple[Tensor, Tensor, Tensor] | None = None,
    left: int = -1, right: int = -1, others: bool = False,
) -> Attended:  # fmt: skip
    """Queries of each bucket attend to its keys, as far as the mask lets them.

    bias (b h m) is added to a key's logits; ``meetings`` makes a pair count once over all rounds (see reference.py);
    ``left``/``right`` bound the distance between positions; ``others``: a query does not see itself.
    """
    if mask.causal:
        right = 0
    low, high, rank = meetings if meetings is not None else (None, None, None)
    keys = tables.hide(buckets.keys, mask.keys)
    return Attended(*_bucketed(q, k, v, bias, buckets.queries, keys, low, high, rank, scale, mask.offset, left, right, others))
