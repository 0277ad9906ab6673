"""Handing rows out: one pass that reads a label and writes a row."""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import in_turn, jit, power, tl
from .._launch import cdiv, launch
from ..bucketed.lists import gather_sum
from ..kmeans.kernels import member_sums
from ..members.kernels import by_label


@jit
def broadcast_fwd_kernel(
    ROWS, LABELS, COUNTS, OUT, n, c, x, SHARED: tl.constexpr, ADDED: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr
):
    """SHARED: each member gets its share of the row, one of COUNTS (lead c). ADDED: to what is there."""
    in_turn()
    lead, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN)
    dims = tl.arange(0, BX)
    label = tl.load(LABELS + lead * n + at, mask=at < n, other=-1)
    row = tl.load(
        ROWS + (lead * c + label)[:, None] * x + dims[None, :],
        mask=(label >= 0)[:, None] & (dims < x)[None, :],
        other=0.0,
    )
    if SHARED:
        count = tl.load(COUNTS + lead * c + label, mask=label >= 0, other=1)
        row = row.to(tl.float32) / tl.maximum(count, 1).to(tl.float32)[:, None]
    to, there = OUT + (lead * n + at)[:, None] * x + dims[None, :], (at < n)[:, None] & (dims < x)[None, :]
    if ADDED:
        row += tl.load(to, mask=there, other=0.0).to(tl.float32)
    tl.store(to, row.to(OUT.dtype.element_ty), mask=there)


def broadcast(rows: Tensor, labels: Tensor, counts: Tensor | None = None) -> Tensor:
    """rows (b h c x), labels (b h n) -> (b h n x); 0 for label -1. With counts (b h c) each row over its count."""
    out = torch.empty(*labels.shape, rows.shape[3], dtype=rows.dtype, device=rows.device)
    _share(rows, labels, counts, out, added=False)
    return out


def add_shares(out: Tensor, rows: Tensor, labels: Tensor, counts: Tensor) -> None:
    """To out (b h n x), dense, each row's share: of rows (b h c x) over counts (b h c)."""
    _share(rows, labels, counts, out, added=True)


def _share(rows: Tensor, labels: Tensor, counts: Tensor | None, out: Tensor, added: bool) -> None:
    rows, labels = rows.contiguous(), labels.contiguous()
    (b, h, c, x), n, wide = rows.shape, labels.shape[2], power(rows.shape[3], least=1)
    tile = max(32, min(1024, 8192 // wide))
    launch(
        broadcast_fwd_kernel, (cdiv(n, tile), b * h), (rows, labels, labels if counts is None else counts, out),
        (n, c, x), SHARED=counts is not None, ADDED=added, BN=tile, BX=wide, num_warps=4,
    )  # fmt: skip


def broadcast_backward(
    d_rows: Tensor, labels: Tensor, order: Tensor | None, first: Tensor | None, clusters: int
) -> Tensor:
    if order is None or first is None:
        order, first = by_label(labels.flatten(0, 1), clusters)
    return member_sums(d_rows, order, first, d_rows.dtype, mean=False)[0]


def take_backward(d_rows: Tensor, at: Tensor, heads: int, length: int) -> Tensor:
    return gather_sum(at.flatten(2).unsqueeze(2), length, d_rows.contiguous(), heads)
