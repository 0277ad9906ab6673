"""From torch's masks (True or -inf = masked OUT) to ours (True = kept), refusing what cannot be honoured."""

from __future__ import annotations

import torch
from torch import Tensor

from .._errors import bad_type, bad_value
from .._types import Method


def kept(padding: Tensor, name: str) -> Tensor:
    """A padding mask. torch's transformer layers turn bool into 0 / -inf on the way: both are read."""
    if padding.dtype == torch.bool:
        return ~padding
    if not padding.is_floating_point():
        raise bad_type(f"{name} bool (True = padding), or 0 / -inf", padding.dtype, f"{name}.bool()")
    kept = padding == 0
    error = bad_value(
        f"{name} of 0 (kept) and -inf (padding)",
        "other numbers",
        "a bool mask, or a bias as attn_mask of ca.Exact()",
    )
    _must((kept | (padding == float("-inf"))).all(), error)
    return kept


def dense(
    given: Tensor, method: Method, shape: tuple[int, int, int, int], is_causal: bool, causal: bool
) -> tuple[Tensor | None, bool]:
    """An attn_mask for logits of a shape (b h n m), as attn_mask and causal of ``ca.attention``.

    The plain causal mask becomes ``causal=True``. Only Exact can take any other.
    """
    b, h, n, m = shape
    if tuple(given.shape) not in ((n, m), (b * h, n, m)):
        raise bad_value(f"attn_mask ({n} {m}) or ({b * h} {n} {m})", tuple(given.shape), "key_padding_mask for padding")
    if given.dtype != torch.bool and not given.is_floating_point():
        raise bad_type("attn_mask bool (True = hidden), or a float bias", given.dtype, "attn_mask.bool()")
    if is_causal or (causal and not method.takes_bias):
        wanted = "the plain causal mask where attention is causal"
        error = bad_value(wanted, "another attn_mask", "method=ca.Exact() without is_causal")
        _must((given == _causal_mask(n, m, given)).all(), error)
        return None, True
    if not method.takes_bias:
        raise bad_value(
            f"no attn_mask: {type(method).__name__} cannot honour a dense mask or an additive bias",
            f"attn_mask {tuple(given.shape)}",
            "method=ca.Exact(), is_causal=True if it is the causal mask, or key_padding_mask",
        )
    ours = ~given if given.dtype == torch.bool else given
    return (ours if ours.dim() == 2 else ours.view(shape)), causal


def _causal_mask(n: int, m: int, like: Tensor) -> Tensor:
    """As torch writes it: True or -inf in the future. The last query stands beside the last key."""
    future = torch.ones(n, m, dtype=torch.bool, device=like.device).triu(m - n + 1)
    return (
        future
        if like.dtype == torch.bool
        else torch.zeros_like(future, dtype=like.dtype).masked_fill(future, float("-inf"))
    )


def _must(holds: Tensor, error: ValueError) -> None:
    """A condition on the content of a tensor; a compiled graph checks it when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(holds, str(error))
    elif not holds:
        raise error
