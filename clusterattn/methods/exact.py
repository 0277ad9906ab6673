"""Softmax attention itself: the yardstick. Served by torch's SDPA; alone in taking dense masks, biases and dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .._types import Attended, Call, Groups, Method
from ..ops import tables
from ..ops._chunks import wide
from ..ops.merge import NEVER


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    name: ClassVar[str] = "exact"
    causality: ClassVar[str] = "strict"
    takes_bias: ClassVar[bool] = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        if call.lse and call.attn_mask is None and call.dropout_p == 0.0:
            b, h, n, _ = q.shape
            everyone = tables.everyone(b, h, n, k.shape[2], q.device)
            answer: Attended = call.ops.bucketed(q, k, v, everyone, call.mask, call.scale)
            return answer
        if call.attn_mask is None and call.mask.keys is None and not (call.mask.causal and call.mask.offset):
            mask, blind = None, None
        else:
            mask, blind = self._dense_mask(q, call)
        causal = call.mask.causal and mask is None
        out = plain(q, k, v, causal, call.scale, call.dropout_p, mask)
        if blind is not None:
            out = out.masked_fill(blind, 0.0)
        return Attended(out, self._dense_lse(q, k, mask, blind, call) if call.lse else out.new_zeros(out.shape[:3]))

    def _future(self, call: Call, device: torch.device) -> Tensor:
        query_at = torch.arange(call.mask.n, device=device) + call.mask.offset
        return torch.arange(call.mask.m, device=device) > query_at.unsqueeze(-1)

    def _dense_mask(self, q: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """SDPA's attn_mask, and the rows (b 1 n 1) that see nothing: shown everything, against NaN, and wiped after."""
        keys, given = call.mask.keys, call.attn_mask
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device) if keys is None else keys[:, None, None, :]
        if call.mask.causal:
            seen = seen & ~self._future(call, q.device)
        if given is not None:
            seen = seen & (given if given.dtype == torch.bool else given > NEVER)
        blind = ~seen.any(-1, keepdim=True)
        seen = seen | blind
        if given is None or given.dtype == torch.bool:
            return seen, blind
        return torch.where(seen, given.masked_fill(blind, 0.0), NEVER).to(q.dtype), blind

    def _dense_lse(self, q: Tensor, k: Tensor, mask: Tensor | None, blind: Tensor | None, call: Call) -> Tensor:
        """The caller gave a dense mask or bias, so an (n x m) tensor exists already: one more for the log-weights."""
        logits = wide(q) @ wide(k).repeat_interleave(q.shape[1] // k.shape[1], 1).mT * call.scale
        if mask is not None:
            logits = logits.masked_fill(~mask, NEVER) if mask.dtype == torch.bool else logits + mask
        elif call.mask.causal:
            logits = logits.masked_fill(self._future(call, q.device), NEVER)
        lse = logits.logsumexp(-1)
        return lse if blind is None else lse.masked_fill(blind.squeeze(-1), NEVER)

    def cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        return pairs(n, m, causal) * (d + e)


def pairs(n: int, m: int, causal: bool) -> int:
    """How many a causal mask leaves: the last query stands beside the last key."""
    if not causal:
        return n * m
    few = min(n, m)
    return n * max(m - n, 0) + few * (few + 1) // 2


def plain(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout_p: float, mask: Tensor | None = None
) -> Tensor:
    """SDPA, causal where there are as many queries as keys."""
    grouped = True if k.shape[1] != q.shape[1] else False  # noqa: SIM210  a plain bool, also for symbolic shapes
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout_p, scale=scale, enable_gqa=grouped
    )


def packs(q: Tensor, v: Tensor, dropout_p: float) -> bool:
    """Does torch's own attention over packed documents serve such a call? Where it does, it is the fastest."""
    d, half = q.shape[-1], q.dtype in (torch.float16, torch.bfloat16)
    fits = q.is_cuda and half and d == v.shape[-1] and d % 8 == 0 and d <= 256 and dropout_p == 0.0
    allowed: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return fits and allowed and torch.cuda.get_device_capability(q.device) >= (8, 0)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Documents one behind the other, q (h tokens d); in a causal call each has as many queries as keys."""
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler

    if k.shape[0] != q.shape[0]:  # it knows of grouped heads from torch 2.12 on
        k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    window = (-1, 0) if causal else (-1, -1)
    out = varlen_attn(q, k, v, *starts, *longest, scale=scale, window_size=window)
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)
