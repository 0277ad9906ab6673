"""Two launches: what the points are seen by, a program for each key head; then one pass over keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._jit import jit, power, precision, rows, tl
from .._launch import cdiv, launch


@jit
def view_kernel(
    Q, K, V, MEANS, LABELS, QUERIES_AT, KEYS_AT, VIEW, CENTRES, n, c, s, t, d, e, heads, group,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm, sab, sah, sbb, sbh,
    BS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """VIEW (lead r d): differences of queries from their centroids, scaled; CENTRES (lead d+e+1): what is taken off the
    keys and the values, and the spread of the values. heads: of the keys."""
    lead = tl.program_id(0).to(tl.int64)
    batch, head = lead // heads, lead % heads
    dims, values, ways, slots = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BR), tl.arange(0, BS)
    wide, long, r = dims < d, values < e, s * group
    for one in range(group):
        mine = head * group + one
        at = tl.load(QUERIES_AT + batch * sab + mine * sah + slots, mask=slots < s, other=-1)
        label = tl.load(LABELS + (batch * heads * group + mine) * n + at, mask=at >= 0, other=-1)
        there = (label >= 0)[:, None] & wide[None, :]
        q = tl.load(Q + batch * sqb + mine * sqh + at[:, None] * sqn + dims[None, :], mask=there, other=0.0)
        row = (batch * heads * group + mine) * c + label
        apart = q.to(tl.float32) - tl.load(MEANS + row[:, None] * d + dims[None, :], mask=there, other=0.0)
        to = (lead * r + one * s + slots)[:, None] * d + dims[None, :]
        tl.store(VIEW + to, apart, mask=(slots < s)[:, None] & wide[None, :])
    tl.debug_barrier()
    place = (lead * r + ways)[:, None] * d + dims[None, :]
    view = tl.load(VIEW + place, mask=(ways < r)[:, None] & wide[None, :], other=0.0)
    k_base, v_base = K + batch * skb + head * skh, V + batch * svb + head * svh
    anchor = tl.maximum(tl.load(KEYS_AT + batch * sbb + head * sbh), 0)
    key_centre = tl.load(k_base + anchor * skm + dims, mask=wide, other=0.0).to(tl.float32)
    value_centre = tl.load(v_base + anchor * svm + values, mask=long, other=0.0).to(tl.float32)
    seen, values_seen = tl.zeros((BR,), tl.float32), tl.zeros((BE,), tl.float32)
    squares, value_squares, total = 0.0, 0.0, 0.0
    for first in range(0, t, BM):
        slot = first + tl.arange(0, BM)
        key = tl.load(KEYS_AT + batch * sbb + head * sbh + slot, mask=slot < t, other=-1)
        real = key >= 0
        k = tl.load(k_base + key[:, None] * skm + dims[None, :], mask=real[:, None] & wide[None, :], other=0.0)
        k = tl.where(real[:, None], k.to(tl.float32) - key_centre[None, :], 0.0)
        product = tl.dot(k, tl.trans(view), input_precision=PRECISION)
        v = tl.load(v_base + key[:, None] * svm + values[None, :], mask=real[:, None] & long[None, :], other=0.0)
        v = tl.where(real[:, None], v.to(tl.float32) - value_centre[None, :], 0.0)
        seen += tl.sum(product, 0)
        values_seen += tl.sum(v, 0)
        squares += tl.sum(product * product)
        value_squares += tl.sum(v * v)
        total += tl.sum(real.to(tl.float32))
    total = tl.maximum(total, 1.0)
    size = tl.maximum(squares / total - tl.sum(seen * seen) / (total * total), 0.0)
    shrink = tl.maximum(value_squares / total - tl.sum(values_seen * values_seen) / (total * total), 0.0)
    view = view / tl.sqrt(tl.where(size > 0, size, 1.0))
    tl.store(VIEW + place, view, mask=(ways < r)[:, None] & wide[None, :])
    centres = CENTRES + lead * (d + e + 1)
    tl.store(centres + dims, key_centre, mask=wide)
    tl.store(centres + d + values, value_centre, mask=long)
    tl.store(centres + d + e, tl.sqrt(tl.where(shrink > 0, shrink, 1.0)))


@jit
def beside_kernel(
    K, V, VIEW, CENTRES, OUT, m, d, e, r, heads, skb, skh, skm, svb, svh, svm,
    BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lead, key = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    dims, values, ways, here = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BR), key < m
    at, batch, head = key.to(tl.int64)[:, None], lead // heads, lead % heads
    of_k, of_v = here[:, None] & (dims < d)[None, :], here[:, None] & (values < e)[None, :]
    centres = CENTRES + lead * (d + e + 1)
    k = tl.load(K + batch * skb + head * skh + at * skm + dims[None, :], mask=of_k, other=0.0)
    x = (k.to(tl.float32) - tl.load(centres + dims, mask=dims < d, other=0.0)[None, :]).to(k.dtype)
    place = (lead * r + ways)[:, None] * d + dims[None, :]
    view = tl.load(VIEW + place, mask=(ways < r)[:, None] & (dims < d)[None, :], other=0.0).to(k.dtype)
    seen = tl.dot(x, tl.trans(view), input_precision=PRECISION)
    to = (lead * m + key)[:, None] * (r + e)
    tl.store(OUT + to + ways[None, :], seen.to(OUT.dtype.element_ty), mask=here[:, None] & (ways < r)[None, :])
    v = tl.load(V + batch * svb + head * svh + at * svm + values[None, :], mask=of_v, other=0.0).to(tl.float32)
    v = (v - tl.load(centres + d + values, mask=values < e, other=0.0)[None, :]) / tl.load(centres + d + e)
    tl.store(OUT + to + r + values[None, :], v.to(OUT.dtype.element_ty), mask=of_v)


def beside(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor, labels: Tensor, queries_at: Tensor, keys_at: Tensor
) -> Tensor:
    q, k, v, queries_at, keys_at = rows(q), rows(k), rows(v), rows(queries_at), rows(keys_at)
    (h, n), (b, hk, m, d), e = q.shape[1:3], k.shape, v.shape[3]
    s, t, group = queries_at.shape[2], keys_at.shape[2], h // hk
    r, dtype = s * group, torch.float32
    view = torch.empty(b * hk, r, d, dtype=dtype, device=k.device)
    centres = torch.empty(b * hk, d + e + 1, dtype=dtype, device=k.device)
    out = torch.empty(b, hk, m, r + e, dtype=k.dtype, device=k.device)
    shape: dict[str, Any] = {"BD": power(d), "BE": power(e), "BR": power(r)}
    # one program for a head, which waits for memory: few turns
    many = max(32, min(128, 8192 // max(shape["BD"], shape["BE"])))
    launch(
        view_kernel, (b * hk,), (q, k, v, means.contiguous(), labels.contiguous(), queries_at, keys_at, view, centres),
        (n, means.shape[2], s, t, d, e, hk, group, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
         *queries_at.stride()[:2], *keys_at.stride()[:2]),
        BS=power(s), BM=many, PRECISION="tf32", num_warps=8, **shape,
    )  # fmt: skip
    tile = 64 if k.element_size() == 2 else 16
    launch(
        beside_kernel, (cdiv(m, tile), b * hk), (k, v, view, centres, out),
        (m, d, e, r, hk, *k.stride()[:3], *v.stride()[:3]),
        BM=tile, PRECISION=precision(k), num_warps=4, **shape,
    )  # fmt: skip
    return out
