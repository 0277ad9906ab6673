"""How far from exact attention. The yardstick is made here, in fp64, and shares no code with the methods."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def exact_answer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    block: int = 512,
) -> Tensor:
    """softmax(q kᵀ · scale) v by blocks of queries: (b h n e) in ``dtype``. Rows that see nothing are 0.

    Args:
        q: queries (b h n d)
        k: keys (b hk m d); hk divides h
        v: values (b hk m e)
        key_mask: bool (b m), True = a real key
        causal: as in ``ca.attention``
        scale: of the logits, 1/sqrt(d) by default
        dtype: in which it is computed
        block: queries at a time
    """
    parts = [
        weights @ _all_heads(v.to(dtype), q) for weights in _weight_blocks(q, k, key_mask, causal, scale, dtype, block)
    ]
    return torch.cat(parts, dim=2) if parts else v.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)


def exact_matrix(
    q: Tensor,
    k: Tensor,
    *,
    key_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The dense (b h n m) weights of exact attention."""
    return next(_weight_blocks(q, k, key_mask, causal, scale, dtype, max(q.shape[2], 1)))


def relative_error(out: Tensor, exact: Tensor, query_mask: Tensor | None = None) -> float:
    """‖out − exact‖ / ‖exact‖ over everything; rows that ``query_mask`` (b n) leaves out do not count.

    Args:
        out: an answer (b h n e)
        exact: the answer it should be
        query_mask: bool (b n), True = a real query
    """
    miss, size = _squares(out, exact, query_mask)
    return float(miss.sum().sqrt() / size.sum().sqrt().clamp_min(torch.finfo(torch.float64).tiny))


def head_errors(out: Tensor, exact: Tensor, query_mask: Tensor | None = None) -> Tensor:
    """The relative error of each batch element and head, (b h).

    Args:
        out: an answer (b h n e)
        exact: the answer it should be
        query_mask: bool (b n), True = a real query
    """
    miss, size = _squares(out, exact, query_mask)
    return (miss.sum(-1).sqrt() / size.sum(-1).sqrt().clamp_min(torch.finfo(torch.float64).tiny)).cpu()


def row_l1(weights: Tensor, exact: Tensor, query_mask: Tensor | None = None) -> float:
    """Mean over rows of Σ_j |a_ij − exact_ij|: 0 is the same distribution, 2 is no key in common.

    Args:
        weights: of a method (b h n m)
        exact: attention's own weights (b h n m)
        query_mask: bool (b n), True = a real query
    """
    rows = (weights.to(exact.dtype) - exact).abs().sum(-1)  # (b h n)
    if query_mask is not None:
        rows = rows.transpose(1, 2)[query_mask]
    return float(rows.mean())


def _squares(out: Tensor, exact: Tensor, query_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    exact = exact.double()
    miss, size = (out.double() - exact).square().sum(-1), exact.square().sum(-1)  # (b h n)
    if query_mask is not None:
        # `where`, not a product: a row that does not count must not reach the sum, not even as NaN
        keep = query_mask[:, None, :]
        miss, size = miss.where(keep, miss.new_zeros(())), size.where(keep, size.new_zeros(()))
    return miss, size


def _all_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) if x.shape[1] != q.shape[1] else x


def _weight_blocks(
    q: Tensor,
    k: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    dtype: torch.dtype,
    block: int,
) -> Iterator[Tensor]:
    """(b h block m) weights, from the first queries to the last; a row that sees nothing is all 0."""
    n, m = q.shape[2], k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    keys = _all_heads(k.to(dtype), q)
    key_at = torch.arange(m, device=q.device)
    for start in range(0, n, block):
        logits = q[:, :, start : start + block].to(dtype) @ keys.mT * scale
        hidden = torch.zeros(1, 1, 1, m, dtype=torch.bool, device=q.device)
        if key_mask is not None:
            hidden = hidden | ~key_mask[:, None, None, :]
        if causal:
            query_at = torch.arange(start, min(start + block, n), device=q.device) + (m - n)
            hidden = hidden | (key_at > query_at[:, None])
        yield logits.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)
