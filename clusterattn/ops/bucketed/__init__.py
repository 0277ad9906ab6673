"""bucketed: attention inside each bucket; a token in several buckets merges its answers by lse.

Behind a torch.library op with its backward written by hand: the loop over buckets stays out of compiled graphs (one
graph serves every length), and what is kept for backward is q, k, v, out and lse, whatever the number of rounds.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor

from ..._types import Attended, Buckets, Mask
from .. import tables
from .._chunks import no_autocast
from .._jit import use_kernel
from ..rows import take
from . import backward_kernels, kernels, reference


@torch.library.custom_op("clusterattn::bucketed", mutates_args=())
def _bucketed(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], queries: Tensor, keys: Tensor,
    low: Optional[Tensor], high: Optional[Tensor], rank: Optional[Tensor],
    scale: float, offset: int, left: int, right: int, others: bool, rounds: int, triton: bool,
    or_self: bool = False, less: float = 0.0, key_mask: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse, and who looked at itself. or_self and less are for the kernel that joins rounds, and for no other."""
    seating = reference.Seating(queries, keys, bias, low, high, rank, scale, offset, left, right, others)
    if triton:
        return kernels.forward(q, k, v, seating, rounds, or_self, less, key_mask)
    return *reference.forward(q, k, v, seating), torch.empty(*q.shape[:2], 0, dtype=torch.int8, device=q.device)


@_bucketed.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], queries: Tensor, keys: Tensor,
    low: Optional[Tensor], high: Optional[Tensor], rank: Optional[Tensor],
    scale: float, offset: int, left: int, right: int, others: bool, rounds: int, triton: bool,
    or_self: bool = False, less: float = 0.0, key_mask: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (b, h, n, _), acc = q.shape, torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_empty((b, h, n, v.shape[3]), dtype=v.dtype if triton else acc),
        q.new_empty((b, h, n), dtype=acc),
        q.new_empty((b, h, n if or_self else 0), dtype=torch.int8),
    )


@torch.library.custom_op("clusterattn::bucketed_backward", mutates_args=())
def _bucketed_backward(
    d_out: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, alone: Tensor,
    bias: Optional[Tensor], queries: Tensor, keys: Tensor,
    low: Optional[Tensor], high: Optional[Tensor], rank: Optional[Tensor],
    scale: float, offset: int, left: int, right: int, others: bool, rounds: int, triton: bool,
    or_self: bool, less: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    seating = reference.Seating(queries, keys, bias, low, high, rank, scale, offset, left, right, others)
    with no_autocast(q):
        if triton:
            dq, dk, dv, d_bias = backward_kernels.backward(
                d_out, d_lse, q, k, v, out, lse, seating, rounds, alone if or_self else None, less
            )
        else:
            dq, dk, dv, d_bias = reference.backward(d_out, d_lse, q, k, v, out, lse, seating)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_bias


@_bucketed_backward.register_fake
def _(
    d_out: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, alone: Tensor,
    bias: Optional[Tensor], *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_bias = q.new_empty((q.shape[0], q.shape[1], k.shape[2] if bias is not None else 0), dtype=lse.dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, *seating = inputs
    ctx.settings = seating[6:15]
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, v, *output, *seating[:6])


def _give_back(ctx: Any, d_out: Tensor, d_lse: Tensor, _: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: a checkpoint unpacks them only once
    dq, dk, dv, d_bias = _bucketed_backward(d_out, d_lse, *saved, *ctx.settings)
    return dq, dk, dv, d_bias if saved[6] is not None else None, *[None] * 15


_bucketed.register_autograd(_give_back, setup_context=_keep)


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
    triton = use_kernel("bucketed", backend, kernels.why_not(q, k, v, buckets.queries, keys))
    seating = (bias, buckets.queries, keys, low, high, rank)
    # the kernel that joins rounds does the rest as well
    joined = triton and buckets.rounds > (0 if or_self else 1)
    out, lse, _ = _bucketed(
        q, k, v, *seating, scale, mask.offset, left, right, others, buckets.rounds, triton,
        or_self and joined, less if joined else 0.0, mask.keys if or_self and joined else None,
    )  # fmt: skip
    if joined:
        return Attended(out, lse)
    answer = Attended(out, lse - less if less else lse)
    if or_self:
        return reference.or_self(answer, q, k, v, mask, scale, partial(take, backend=backend))
    return answer
