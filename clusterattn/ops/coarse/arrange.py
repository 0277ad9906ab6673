"""Keys and values as the kernels walk over them: as they came, or in the order of their parts.

In that order each part is a stretch: kernels read whole tiles, and the bit mask of near keys in whole words. Forward
looks the rows up one by one, which costs less than a copy; backward, which reads them more often, makes the copy.
Gradients go back to where the keys came from. Those of near keys, which are read where they came from and come cluster
by cluster, are added key by key: sorted by stretches of keys, then picked by a product with ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..._types import Members
from .._jit import in_turn, jit, power, rows, tl
from .._launch import cdiv, launch
from ..members.kernels import by_label

STRETCHES = 1008  # of keys at most, that gradients of near keys are sorted by: with both ends one tile of the sort


@dataclass(frozen=True)
class Arranged:
    k: Tensor  # (b hk m d)
    v: Tensor  # (b hk m e)
    keep: Tensor | None  # (b m), or (b hk m) where they were moved: False for a key that is not real
    order: Tensor | None = None  # (b*hk m): where each came from, or stands
    first: Tensor | None = None  # (b*hk p+2): where each part begins
    place: Tensor | None = None  # (b*hk m): where each stands in the order
    largest: Tensor | None = None  # (b*hk p): the parts from the largest to the smallest
    moved: bool = True  # with an order: the rows are a copy in that order

    @property
    def by_order(self) -> bool:
        """Rows are looked up."""
        return self.order is not None and not self.moved

    @property
    def keep_strides(self) -> tuple[int, int]:
        if self.keep is None:
            return 0, 0
        return (self.keep.stride(0), self.keep.stride(1)) if self.keep.dim() == 3 else (self.keep.stride(0), 0)

    def keep_or(self, other: Tensor) -> Tensor:
        return other if self.keep is None else self.keep

    def first_or(self, other: Tensor) -> Tensor:
        return other if self.first is None else self.first

    def order_or(self, other: Tensor) -> Tensor:
        return other if self.order is None else self.order

    def place_or(self, other: Tensor) -> Tensor:
        return other if self.place is None else self.place

    def largest_or(self, other: Tensor) -> Tensor:
        return other if self.largest is None else self.largest


@jit
def rows_of(ORDER, lead, place, m, BY_ORDER: tl.constexpr):
    """The rows of the keys at these places."""
    if BY_ORDER:
        place = tl.load(ORDER + lead * m + place, mask=place < m, other=0)
    return place


@jit
def arrange_kernel(
    K, V, ORDER, TO_K, TO_V, m, d, e, heads, skb, skh, skm, svb, svh, svm,
    BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Row i of the copy is row ORDER[i] of the original."""
    in_turn()
    lead, place = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    dims, values, here = tl.arange(0, BD), tl.arange(0, BE), place < m
    source = tl.load(ORDER + lead * m + place, mask=here, other=0).to(tl.int64)
    k_from = K + (lead // heads) * skb + (lead % heads) * skh + source[:, None] * skm + dims[None, :]
    v_from = V + (lead // heads) * svb + (lead % heads) * svh + source[:, None] * svm + values[None, :]
    of_k, of_v = here[:, None] & (dims < d)[None, :], here[:, None] & (values < e)[None, :]
    to = (lead * m + place)[:, None]
    tl.store(TO_K + to * d + dims[None, :], tl.load(k_from, mask=of_k, other=0.0), mask=of_k)
    tl.store(TO_V + to * e + values[None, :], tl.load(v_from, mask=of_v, other=0.0), mask=of_v)


@jit
def near_shares_kernel(
    NEAR_AT, ENTRIES, FIRST, NEAR_DK, NEAR_DV, DK, DV, m, d, e, total, stretches, width,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What stands at the entries of NEAR_AT (lead total) is added to DK and DV. ENTRIES: their numbers by stretches of
    keys, each so wide."""
    in_turn()
    lead, place = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    stretch = tl.program_id(0) * BM // width
    begin = tl.load(FIRST + lead * (stretches + 2) + stretch)
    end = tl.load(FIRST + lead * (stretches + 2) + stretch + 1)
    if end > begin:
        dims, values = tl.arange(0, BD), tl.arange(0, BE)
        dk, dv, hits = tl.zeros((BM, BD), tl.float32), tl.zeros((BM, BE), tl.float32), tl.zeros((BM,), tl.int32)
        for turn in range(begin, end, BN):
            entry = turn + tl.arange(0, BN)
            there = entry < end
            row = lead * total + tl.load(ENTRIES + lead * total + tl.minimum(entry, end - 1))
            at = tl.load(NEAR_AT + row, mask=there, other=-1).to(tl.int32)
            k = tl.load(
                NEAR_DK + row[:, None] * d + dims[None, :], mask=there[:, None] & (dims < d)[None, :], other=0.0
            )
            v = tl.load(
                NEAR_DV + row[:, None] * e + values[None, :], mask=there[:, None] & (values < e)[None, :], other=0.0
            )
            mine = place[:, None] == at[None, :]
            hits += tl.sum(mine.to(tl.int32), 1)
            dk += tl.dot(mine.to(k.dtype), k, input_precision="tf32x3")
            dv += tl.dot(mine.to(v.dtype), v, input_precision="tf32x3")
        hit, to = (hits > 0)[:, None], (lead * m + place)[:, None]
        of_k, of_v = hit & (dims < d)[None, :], hit & (values < e)[None, :]
        dk += tl.load(DK + to * d + dims[None, :], mask=of_k, other=0.0).to(tl.float32)
        dv += tl.load(DV + to * e + values[None, :], mask=of_v, other=0.0).to(tl.float32)
        tl.store(DK + to * d + dims[None, :], dk.to(DK.dtype.element_ty), mask=of_k)
        tl.store(DV + to * e + values[None, :], dv.to(DV.dtype.element_ty), mask=of_v)


def in_order(k: Tensor, v: Tensor, keep: Tensor | None, parts: Members | None = None) -> Arranged:
    """Keys as they came, beside the order of their parts; None where they are one."""
    keys = Arranged(rows(k), rows(v), None if keep is None else keep.contiguous(), moved=False)
    if parts is None:
        return keys
    return replace(keys, order=parts.order, first=parts.first, place=parts.place, largest=parts.largest)


def arrange(keys: Arranged) -> Arranged:
    """A copy of the rows in the order of their parts."""
    k, v, keep, order = keys.k, keys.v, keys.keep, keys.order
    if order is None:
        return keys
    (b, hk, m, d), e = k.shape, v.shape[3]
    if keep is not None:
        keep = keep.unsqueeze(1).expand(b, hk, m).gather(2, order.view(b, hk, m).long())
    to_k, to_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    launch(
        arrange_kernel, (cdiv(m, 64), b * hk), (k, v, order, to_k, to_v),
        (m, d, e, hk, *k.stride()[:3], *v.stride()[:3]), BM=64, BD=power(d), BE=power(e), num_warps=4,
    )  # fmt: skip
    return replace(keys, k=to_k, v=to_v, keep=keep, moved=True)


def add_near(dk: Tensor, dv: Tensor, near_at: Tensor, near_dk: Tensor, near_dv: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values (b hk m ...) with those of the near keys at near_at (b*h c t): in place."""
    (b, hk, m, d), e, half = dk.shape, dv.shape[3], dk.element_size() == 2
    if near_at.shape[2] == 0:
        return dk, dv
    tile = 32
    width = tile * cdiv(m, tile * STRETCHES)
    stretches = cdiv(cdiv(m, width), 16) * 16  # some are empty: kernels tell multiples of 16 from other numbers
    entries, first = by_label(near_at.view(b * hk, -1), stretches, width)
    launch(
        near_shares_kernel, (cdiv(m, tile), b * hk),
        (near_at, entries, first, near_dk, near_dv, dk, dv),
        (m, d, e, near_at.numel() // (b * hk), stretches, width), BM=tile, BN=32, BD=power(d), BE=power(e),
        num_warps=2 if half and d + e <= 128 else 4, num_stages=1,
    )  # fmt: skip
    return dk, dv
