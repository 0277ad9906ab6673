"""Keys and values as the kernels walk over them: as they came, or copied in the order of their parts.

A copy costs one pass over the keys and makes each part a stretch of rows: the kernels read whole tiles, and the bit
mask of near keys in whole words. Gradients go back to where the keys came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._jit import jit, power, rows, tl
from .._launch import cdiv, launch


@dataclass(frozen=True)
class Arranged:
    k: Tensor  # (b hk m d)
    v: Tensor  # (b hk m e)
    keep: Tensor | None  # (b m), or (b hk m) where they were moved: False for a key that is not real
    order: Tensor | None = None  # (b*hk m): where each came from
    first: Tensor | None = None  # (b*hk p+2): where each part begins

    @property
    def keep_strides(self) -> tuple[int, int]:
        if self.keep is None:
            return 0, 0
        return (self.keep.stride(0), self.keep.stride(1)) if self.keep.dim() == 3 else (self.keep.stride(0), 0)

    def keep_or(self, other: Tensor) -> Tensor:
        return other if self.keep is None else self.keep

    def first_or(self, other: Tensor) -> Tensor:
        return other if self.first is None else self.first


@jit
def arrange_kernel(
    K, V, ORDER, TO_K, TO_V, m, d, e, heads, skb, skh, skm, svb, svh, svm,
    BACK: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Row i of the copy is row ORDER[i] of the original. BACK: the other way round."""
    lead, place = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    dims, values, here = tl.arange(0, BD), tl.arange(0, BE), place < m
    at = tl.load(ORDER + lead * m + place, mask=here, other=0).to(tl.int64)
    place = place.to(tl.int64)
    source, to = at, place
    if BACK:
        source, to = place, at
    k_from = K + (lead // heads) * skb + (lead % heads) * skh + source[:, None] * skm + dims[None, :]
    v_from = V + (lead // heads) * svb + (lead % heads) * svh + source[:, None] * svm + values[None, :]
    of_k, of_v = here[:, None] & (dims < d)[None, :], here[:, None] & (values < e)[None, :]
    tl.store(TO_K + (lead * m + to[:, None]) * d + dims[None, :], tl.load(k_from, mask=of_k, other=0.0), mask=of_k)
    tl.store(TO_V + (lead * m + to[:, None]) * e + values[None, :], tl.load(v_from, mask=of_v, other=0.0), mask=of_v)


def _moved(k: Tensor, v: Tensor, order: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    (b, hk, m, d), e = k.shape, v.shape[3]
    to_k, to_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    launch(
        arrange_kernel, (cdiv(m, 64), b * hk), (k, v, order, to_k, to_v),
        (m, d, e, hk, *k.stride()[:3], *v.stride()[:3]),
        BACK=back, BM=64, BD=power(d), BE=power(e), num_warps=4,
    )  # fmt: skip
    return to_k, to_v


def arrange(k: Tensor, v: Tensor, keep: Tensor | None, order: Tensor | None, first: Tensor | None) -> Arranged:
    """order (b*hk m), first (b*hk p+2): of the keys by part, None where they are one."""
    k, v = rows(k), rows(v)
    if order is None or first is None:
        return Arranged(k, v, None if keep is None else keep.contiguous())
    if keep is not None:
        b, hk, m = k.shape[:3]
        keep = keep.unsqueeze(1).expand(b, hk, m).gather(2, order.view(b, hk, m).long())
    return Arranged(*_moved(k, v, order, back=False), keep, order, first)


def put_back(dk: Tensor, dv: Tensor, keys: Arranged) -> tuple[Tensor, Tensor]:
    """Gradients of the arranged keys and values, where these came from."""
    return (dk, dv) if keys.order is None else _moved(dk, dv, keys.order, back=True)
