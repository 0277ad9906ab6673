"""What the points are seen by: one launch, a program for each key head. Points of some keys, or of all: one launch. The
nearest centre of every key: one pass over keys and values, whose points stay in registers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._jit import in_turn, jit, narrow, power, precision, rows, tl
from .._launch import cdiv, launch
from ..kmeans.nearest_kernels import TILE, crowded, highest_of, nearest, spread

MOST = 128  # centres that stay where they are while the keys pass


@jit
def view_kernel(
    Q, K, V, MEANS, LABELS, QUERIES_AT, KEYS_AT, VIEW, CENTRES, n, c, s, t, d, e, heads, group,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm, sab, sah, sbb, sbh,
    BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """VIEW (lead r d): differences of queries from their centroids, scaled; CENTRES (lead d+e+1): what is taken off the
    keys and the values, and the spread of the values. heads: of the keys."""
    in_turn()
    lead = tl.program_id(0).to(tl.int64)
    batch, head = lead // heads, lead % heads
    dims, values, ways = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BR)
    wide, long, r = dims < d, values < e, s * group
    # keys are asked for before anybody waits for queries, and those of a block while the one before is counted
    keys_at = KEYS_AT + batch * sbb + head * sbh
    anchor = tl.maximum(tl.load(keys_at), 0)
    key = tl.load(keys_at + tl.arange(0, BM), mask=tl.arange(0, BM) < t, other=-1)
    k_base, v_base = K + batch * skb + head * skh, V + batch * svb + head * svh
    key_centre = tl.load(k_base + anchor * skm + dims, mask=wide, other=0.0).to(tl.float32)
    value_centre = tl.load(v_base + anchor * svm + values, mask=long, other=0.0).to(tl.float32)
    mine = head * group + ways // s  # whose query
    at = tl.load(QUERIES_AT + batch * sab + mine * sah + ways % s, mask=ways < r, other=-1)
    row = batch * heads * group + mine
    label = tl.load(LABELS + row * n + at, mask=at >= 0, other=-1)
    there = (label >= 0)[:, None] & wide[None, :]
    q = tl.load(Q + batch * sqb + (mine * sqh + at * sqn)[:, None] + dims[None, :], mask=there, other=0.0)
    mean = tl.load(MEANS + (row * c + label)[:, None] * d + dims[None, :], mask=there, other=0.0)
    view = q.to(tl.float32) - mean.to(tl.float32)
    seen, values_seen = tl.zeros((BR,), tl.float32), tl.zeros((BE,), tl.float32)
    squares, value_squares, total = tl.zeros((BR,), tl.float32), tl.zeros((BE,), tl.float32), 0.0
    for first in range(0, t, BM):
        real = key >= 0
        k = tl.load(k_base + key[:, None] * skm + dims[None, :], mask=real[:, None] & wide[None, :], other=0.0)
        v = tl.load(v_base + key[:, None] * svm + values[None, :], mask=real[:, None] & long[None, :], other=0.0)
        slot = first + BM + tl.arange(0, BM)
        key = tl.load(keys_at + slot, mask=slot < t, other=-1)
        k = tl.where(real[:, None], k.to(tl.float32) - key_centre[None, :], 0.0)
        product = tl.dot(k, tl.trans(view), input_precision=PRECISION)
        v = tl.where(real[:, None], v.to(tl.float32) - value_centre[None, :], 0.0)
        seen += tl.sum(product, 0)
        values_seen += tl.sum(v, 0)
        squares += tl.sum(product * product, 0)
        value_squares += tl.sum(v * v, 0)
        total += tl.sum(real.to(tl.float32))
    total = tl.maximum(total, 1.0)
    size = tl.maximum(tl.sum(squares) / total - tl.sum(seen * seen) / (total * total), 0.0)
    shrink = tl.maximum(tl.sum(value_squares) / total - tl.sum(values_seen * values_seen) / (total * total), 0.0)
    view = view / tl.sqrt(tl.where(size > 0, size, 1.0))
    to = (lead * r + ways)[:, None] * d + dims[None, :]
    tl.store(VIEW + to, view.to(VIEW.dtype.element_ty), mask=(ways < r)[:, None] & wide[None, :])
    centres = CENTRES + lead * (d + e + 1)
    tl.store(centres + dims, key_centre, mask=wide)
    tl.store(centres + d + values, value_centre, mask=long)
    tl.store(centres + d + e, tl.sqrt(tl.where(shrink > 0, shrink, 1.0)))


@jit
def beside_kernel(
    K, V, VIEW, CENTRES, FIRST_AT, SECOND_AT, OUT, FIRST, SECOND, total, s, d, e, r, heads,
    skb, skh, skm, svb, svh, svm, sab, sah, sbb, sbh,
    HAS_AT: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the keys at FIRST_AT (s of them) and SECOND_AT, or of the first ``total``: OUT (lead total r+e); FIRST and
    SECOND: where among them."""
    in_turn()
    lead, slot = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    batch, head = lead // heads, lead % heads
    dims, values, ways = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BR)
    here, key = slot < total, slot.to(tl.int64)
    if HAS_AT:
        first, second = FIRST_AT + batch * sab + head * sah, SECOND_AT + batch * sbb + head * sbh
        key = tl.load(first + slot, mask=slot < s, other=-1)
        key = tl.where(slot < s, key, tl.load(second + slot - s, mask=here & (slot >= s), other=-1))
        place = tl.where(key >= 0, slot, -1).to(tl.int64)
        tl.store(FIRST + lead * s + slot, place, mask=slot < s)
        tl.store(SECOND + lead * (total - s) + slot - s, place, mask=here & (slot >= s))
    real, at = (here & (key >= 0))[:, None], key[:, None]
    is_k, is_v = (dims < d)[None, :], (values < e)[None, :]
    centres = CENTRES + lead * (d + e + 1)
    k = tl.load(K + batch * skb + head * skh + at * skm + dims[None, :], mask=real & is_k, other=0.0)
    v = tl.load(V + batch * svb + head * svh + at * svm + values[None, :], mask=real & is_v, other=0.0).to(tl.float32)
    x = (k.to(tl.float32) - tl.load(centres + dims, mask=dims < d, other=0.0)[None, :]).to(k.dtype)
    view = tl.load(
        VIEW + (lead * r + ways)[:, None] * d + dims[None, :], mask=(ways < r)[:, None] & is_k, other=0.0
    )  # fmt: skip
    seen = tl.dot(x, tl.trans(view), input_precision=PRECISION)
    to = (lead * total + slot)[:, None] * (r + e)
    tl.store(OUT + to + ways[None, :], seen.to(OUT.dtype.element_ty), mask=here[:, None] & (ways < r)[None, :])
    v = v - tl.load(centres + d + values, mask=values < e, other=0.0)[None, :]
    v = v * (1.0 / tl.load(centres + d + e))
    tl.store(OUT + to + r + values[None, :], v.to(OUT.dtype.element_ty), mask=here[:, None] & is_v)


@jit
def nearest_beside_kernel(
    K, V, VIEW, CENTRES, ORIGIN, W, OFFSET, LABELS, m, d, e, r, c, heads, stretch, skb, skh, skm, svb, svh, svm,
    BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Points are rounded as ``beside_kernel`` writes them and then as nearest_whole_kernel takes their origin off; the
    product with the centres W (lead c r+e) has two pieces, of directions and of values."""
    in_turn()
    lead = tl.program_id(1).to(tl.int64)
    batch, head = lead // heads, lead % heads
    dims, values, ways = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BR)
    which = tl.minimum(tl.arange(0, BC), c - 1)  # the last one again, where there are fewer
    is_k, is_v, is_way = (dims < d)[None, :], (values < e)[None, :], (ways < r)[None, :]
    view = tl.load(
        VIEW + (lead * r + ways)[:, None] * d + dims[None, :], mask=(ways < r)[:, None] & is_k, other=0.0
    )  # fmt: skip
    row = W + (lead * c + which)[:, None] * (r + e)
    of_keys = tl.load(row + ways[None, :], mask=is_way, other=0.0)
    of_values = tl.load(row + r + values[None, :], mask=is_v, other=0.0)
    offset = tl.load(OFFSET + lead * c + which)
    centres, origin = CENTRES + lead * (d + e + 1), ORIGIN + lead * (r + e)
    key_centre = tl.load(centres + dims, mask=dims < d, other=0.0)[None, :]
    value_centre = tl.load(centres + d + values, mask=values < e, other=0.0)[None, :]
    scale = 1.0 / tl.load(centres + d + e)
    seen_origin = tl.load(origin + ways, mask=ways < r, other=0.0)[None, :]
    value_origin = tl.load(origin + r + values, mask=values < e, other=0.0)[None, :]
    k_base, v_base = K + batch * skb + head * skh, V + batch * svb + head * svh
    low = tl.program_id(0) * stretch
    for start in tl.range(low, min(m, low + stretch), BM, num_stages=2):
        key = start + tl.arange(0, BM)
        here, at = (key < m)[:, None], key.to(tl.int64)[:, None]
        k = tl.load(k_base + at * skm + dims[None, :], mask=here & is_k, other=0.0)
        v = tl.load(v_base + at * svm + values[None, :], mask=here & is_v, other=0.0)
        seen = tl.dot((k.to(tl.float32) - key_centre).to(k.dtype), tl.trans(view)).to(k.dtype)
        seen = (seen.to(tl.float32) - seen_origin).to(k.dtype)
        beside = ((v.to(tl.float32) - value_centre) * scale).to(k.dtype)
        beside = (beside.to(tl.float32) - value_origin).to(k.dtype)
        if BC > 64:  # read again for each tile: kept, they would take the registers of another program
            offset = tl.load(OFFSET + lead * c + which)
        scores = tl.dot(beside, tl.trans(of_values), tl.dot(seen, tl.trans(of_keys)) + offset[None, :])
        highest, label = highest_of(scores, BM, BC)
        label = tl.where(highest > float("-inf"), tl.minimum(label, c - 1), 0)
        tl.store(LABELS + lead * m + key, label.to(tl.int64), mask=key < m)


def view(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor, labels: Tensor, queries_at: Tensor, keys_at: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v, queries_at, keys_at = rows(q), rows(k), rows(v), rows(queries_at), rows(keys_at)
    (h, n), (b, hk, _, d), e = q.shape[1:3], k.shape, v.shape[3]
    s, t, group = queries_at.shape[2], keys_at.shape[2], h // hk
    directions = torch.empty(b, hk, s * group, d, dtype=k.dtype, device=k.device)
    centres = torch.empty(b, hk, d + e + 1, dtype=torch.float32, device=k.device)
    shape = _shape(k, v, directions)
    # one program for a head, which waits for memory: few turns
    many = max(32, min(256, (16384 if narrow(k, v) else 8192) // max(shape["BD"], shape["BE"])))
    launch(
        view_kernel, (b * hk,),
        (q, k, v, means.contiguous(), labels.contiguous(), queries_at, keys_at, directions, centres),
        (n, means.shape[2], s, t, d, e, hk, group, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
         *queries_at.stride()[:2], *keys_at.stride()[:2]),
        BM=many, PRECISION="tf32", num_warps=8, **shape,
    )  # fmt: skip
    return directions, centres


def _shape(k: Tensor, v: Tensor, directions: Tensor) -> dict[str, Any]:
    return {"BD": power(k.shape[3]), "BE": power(v.shape[3]), "BR": power(directions.shape[2])}


def beside(
    k: Tensor, v: Tensor, directions: Tensor, centres: Tensor, first_at: Tensor | None, second_at: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    k, v, directions, centres = rows(k), rows(v), directions.contiguous(), centres.contiguous()
    (b, hk, m, d), e, r = k.shape, v.shape[3], directions.shape[2]
    lots = [rows(at) for at in (first_at, second_at) if at is not None]
    drawn = sum(at.shape[2] for at in lots)
    total = drawn if lots else m
    points = torch.empty(b, hk, total, r + e, dtype=k.dtype, device=k.device)
    first, second = (lots[0], lots[-1]) if lots else (centres, centres)
    few = lots[0].shape[2] if lots else 0
    places = [torch.empty(b, hk, many, dtype=torch.int64, device=k.device) for many in (few, drawn - few)]
    tile = 64 if k.element_size() == 2 else 16
    launch(
        beside_kernel, (cdiv(total, tile), b * hk), (k, v, directions, centres, first, second, points, *places),
        (total, first.shape[2], d, e, r, hk, *k.stride()[:3], *v.stride()[:3],
         *first.stride()[:2], *second.stride()[:2]),
        HAS_AT=bool(lots), BM=tile, PRECISION=precision(k), num_warps=4, **_shape(k, v, directions),
    )  # fmt: skip
    return points, places[0], places[1]


def nearest_beside(
    k: Tensor, v: Tensor, directions: Tensor, centres: Tensor, right: Tensor, offset: Tensor, origin: Tensor
) -> Tensor:
    (b, hk, m, d), e, c, r = k.shape, v.shape[3], right.shape[1], directions.shape[2]
    shape = _shape(k, v, directions)
    if not (k.element_size() == 2 and max(shape.values()) <= 128 and c <= MOST):
        return nearest(beside(k, v, directions, centres, None, None)[0], right, offset, origin)
    k, v, directions, centres = rows(k), rows(v), directions.contiguous(), centres.contiguous()
    right, offset, origin = right.to(k.dtype).contiguous(), offset.float().contiguous(), origin.float().contiguous()
    found = torch.empty(b * hk, m, dtype=torch.int64, device=k.device)
    each = 2 if max(shape.values()) > 64 else 3 if c > 64 else 4
    programs, stretch = spread(m, b * hk, k, each)
    launch(
        nearest_beside_kernel, (programs, b * hk), (k, v, directions, centres, origin, right, offset, found),
        (m, d, e, r, c, hk, stretch, *k.stride()[:3], *v.stride()[:3]),
        BM=TILE, BC=power(c), num_warps=4, **shape, **crowded(k, each),
    )  # fmt: skip
    return found
