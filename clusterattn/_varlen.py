"""Attention over packed sequences, called like flash-attention's varlen functions."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ._attention import DEFAULT, attention
from ._documents import Documents, Starts, from_starts
from ._errors import bad_type, bad_value
from .methods import MethodSpec
from .ops._op import op


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    method: MethodSpec = DEFAULT,
    causal: bool = False,
    scale: float | None = None,
    generator: torch.Generator | None = None,
    seed: int | Tensor = 0,
    backend: str = "auto",
    state: Any = None,
    points: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of many documents that lie one behind the other, each to its own keys alone.

    q ``(tokens h d)``, k ``(tokens hk d)``, v ``(tokens hk e)`` -> out ``(tokens h e)``; hk divides h (grouped heads).
    The answer is that of a loop over the documents with ``ca.attention``, forward and backward, up to the rounding of
    sums in another order: groups never cross a document, draws do not depend on its neighbours.

    Args:
        q: queries (tokens h d)
        k: keys (tokens hk d); hk divides h
        v: values (tokens hk e)
        cu_seqlens_q: whole numbers (documents + 1,): document i has queries cu_seqlens_q[i] to cu_seqlens_q[i + 1].
            Begins with 0, never falls, ends at the tokens there are; equal neighbours are an empty document
        cu_seqlens_k: the same of the keys; None: as the queries. A document that has queries and no keys answers 0,
            with lse -inf and gradient 0
        max_seqlen_q: of the longest document; only checked, and may be left out
        max_seqlen_k: of the longest document; only checked, and may be left out
        method: as in ``ca.attention``. Sizes that it leaves open are chosen once, for the longest document. "auto"
            chooses for each length, so that short documents are answered exactly and long ones are not
        causal: a document's last query stands beside its last key
        scale: as in ``ca.attention``
        generator: as in ``ca.attention``
        seed: as in ``ca.attention``
        backend: as in ``ca.attention``
        state: as in ``ca.attention``
        points: for ClusterFormer: (tokens x)
        return_lse: also return lse (h tokens), as flash-attention has it

    Documents of equal length share a call. So do neighbours in length, padded to the longest of them, where the padding
    costs less than one more call; those that are answered exactly are never padded. In causal cross-attention, and with
    ``Local``, documents share a call only where they have equally many keys more than queries.

    The host has to know the lengths: cu_seqlens on a GPU is read once, and remembered for as long as the tensor lives
    and is not written to (inference tensors: read in every call). On the CPU it costs no wait. Compiled, the whole call
    is one operator, whose backward runs the forward once more.
    """
    starts = Starts(cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
    q, k, v = _row("q", "h d", q), _row("k", "hk d", k), _row("v", "hk e", v)
    if not torch.compiler.is_compiling():
        _check_longest(from_starts(starts, (q.shape[2], k.shape[2])), max_seqlen_q, max_seqlen_k)
    if points is not None:
        points = points.unsqueeze(0)
    answer = attention(
        q,
        k,
        v,
        method=method,
        documents=starts,
        causal=causal,
        scale=scale,
        generator=generator,
        seed=seed,
        backend=backend,
        state=state,
        points=points,
        return_lse=return_lse,
    )
    if return_lse:
        return answer[0].squeeze(0).transpose(0, 1), answer[1].squeeze(0)
    return answer.squeeze(0).transpose(0, 1)


def _row(name: str, dims: str, x: Tensor) -> Tensor:
    """Tokens (tokens h d) as one row of a batch (1 h tokens d)."""
    if not isinstance(x, Tensor):
        raise bad_type(f"{name} a torch.Tensor", type(x).__name__, f"torch.as_tensor({name})")
    if x.is_nested:
        raise bad_type(f"{name} (tokens {dims})", "a nested tensor", f"{name}.values(), with {name}.offsets()")
    if x.dim() != 3:
        raise bad_value(f"{name} (tokens {dims})", tuple(x.shape), "ca.attention for (b h n d)")
    return x.transpose(0, 1).unsqueeze(0)


def _check_longest(documents: Documents, *most: int | None) -> None:
    for name, longest, given in zip(("max_seqlen_q", "max_seqlen_k"), documents.longest, most, strict=True):
        if given is not None and given < longest:
            raise bad_value(f"{name} of at least the longest document's {longest} tokens", given, "leaving it out")


# ---------------------------------------------------------------------------------------------------- compiled


def _answer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    query_mask: Optional[Tensor],
    key_mask: Optional[Tensor],
    held_seed: Optional[Tensor],
    starts: bool,
    method: str,
    causal: bool,
    scale: float,
    seed: int,
    backend: str,
    lse: bool,
) -> tuple[Tensor, Tensor]:
    """``attention`` with documents as one operator: lengths are known when it runs, not when it is compiled."""
    answer = attention(
        q,
        k,
        v,
        method=method,
        documents=Starts(queries, keys) if starts else (queries, keys),
        query_mask=query_mask,
        key_mask=key_mask,
        causal=causal,
        scale=scale,
        seed=seed if held_seed is None else held_seed,
        backend=backend,
        return_lse=lse,
    )
    out, weight = answer if lse else (answer, _no_weight(q))
    return out.contiguous(), weight.contiguous()


_by_document = op("by_document")(_answer)


@_by_document.fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    weight = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)) if rest[-1] else _no_weight(q)
    return q.new_empty(*q.shape[:3], v.shape[3]), weight


def _no_weight(q: Tensor) -> Tensor:
    return q.new_zeros(0, dtype=torch.float32)


# What a thread knows outside of every operator: inside one nothing would be recorded.
_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@op("by_document_backward")
def _backward(
    d_out: Optional[Tensor],
    d_lse: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    query_mask: Optional[Tensor],
    key_mask: Optional[Tensor],
    held_seed: Optional[Tensor],
    starts: bool,
    method: str,
    causal: bool,
    scale: float,
    seed: int,
    backend: str,
    lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward once more, recorded, and its gradients: what lies between is of shapes that no graph knows."""
    with torch._C._ForceDispatchKeyGuard(*_OUTSIDE), torch.enable_grad():
        q, k, v = leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        answer = _answer(
            q, k, v, queries, keys, query_mask, key_mask, held_seed, starts, method, causal, scale, seed, backend, lse
        )
        sent = [(part, grad) for part, grad in zip(answer, (d_out, d_lse), strict=True) if grad is not None]
        found = torch.autograd.grad([part for part, _ in sent], leaves, [grad for _, grad in sent], allow_unused=True)
    dq, dk, dv = (torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, leaves, strict=True))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_backward.fake
def _(d_out: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.rest = inputs[8:]


def _give_back(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> Any:
    return _backward(d_out, d_lse if ctx.rest[-1] else None, *ctx.saved_tensors, *ctx.rest)


_by_document.gradient(_give_back, _keep)
