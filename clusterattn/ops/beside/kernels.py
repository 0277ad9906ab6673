"""What the points are seen by: one launch, a program for each key head. Points of some keys, or of all: one launch. The
nearest centre of every key: one pass over keys and values, whose points stay in registers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._jit import in_turn, jit, narrow, power, precision, rows, tl
from .._launch import cdiv, launch
from ..kmeans.nearest_kernels import TILE, crowded, highest_of, nearest, spread
from . import EVERY

MOST = 128  # centres that stay where they are while the keys pass


@jit
def _nearest_start(
    q, Q, STARTS_AT, K, KEYS_AT, key_centre, mine, first_head, dims, c, t, d, group, sqh, sqn, skm, seh,
    EVERY: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For each row of q, a query of the head ``mine``, the nearest of its head's queries at STARTS_AT, as some of the
    keys at KEYS_AT see it: which of the starts, -1 where there is none. All in one pass over the keys for some of the
    starts: sums of products, from which those of the means are taken off."""
    wide = (dims < d)[None, :]
    first = tl.load(STARTS_AT + mine * seh)  # all are taken relative to it: a shared offset costs digits
    q -= tl.load(Q + (mine * sqh + first * sqn)[:, None] + dims[None, :], mask=(first >= 0)[:, None] & wide, other=0.0)
    best, label, turns = tl.full((BR,), float("-inf"), tl.float32), tl.full((BR,), -1, tl.int32), tl.cdiv(c, BS)
    for turn in range(group * turns):
        head, begin = first_head + turn // turns, turn % turns * BS
        of_head, which = STARTS_AT + head * seh, begin + tl.arange(0, BS)
        at = tl.load(of_head + which, mask=which < c, other=-1)
        base = tl.maximum(tl.load(of_head), 0)
        start = tl.load(Q + head * sqh + at[:, None] * sqn + dims[None, :], mask=(at >= 0)[:, None] & wide, other=0.0)
        origin = tl.load(Q + head * sqh + base * sqn + dims, mask=dims < d, other=0.0).to(tl.float32)
        start = tl.where((at >= 0)[:, None], start.to(tl.float32) - origin[None, :], 0.0)
        both, squares = tl.zeros((BR, BS), tl.float32), tl.zeros((BS,), tl.float32)
        of_q, of_start, total = tl.zeros((BR,), tl.float32), tl.zeros((BS,), tl.float32), 0.0
        for low in range(0, t, BK * EVERY):
            slot = low + tl.arange(0, BK) * EVERY
            key = tl.load(KEYS_AT + slot, mask=slot < t, other=-1)
            real = (key >= 0)[:, None]
            k = tl.load(K + key[:, None] * skm + dims[None, :], mask=real & wide, other=0.0).to(tl.float32)
            k = tl.where(real, k - key_centre[None, :], 0.0)
            seen = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            starts_seen = tl.dot(k, tl.trans(start), input_precision=PRECISION)
            both = tl.dot(seen, starts_seen, both, input_precision=PRECISION)
            squares += tl.sum(starts_seen * starts_seen, 0)
            of_q += tl.sum(seen, 1)
            of_start += tl.sum(starts_seen, 0)
            total += tl.sum((key >= 0).to(tl.float32))
        of_start = of_start / tl.maximum(total, 1.0)
        scores = both - of_q[:, None] * of_start[None, :]
        scores -= 0.5 * (squares - total * of_start * of_start)[None, :]
        scores = tl.where((at >= 0)[None, :] & (mine == head)[:, None], scores, float("-inf"))
        highest, index = tl.max(scores, axis=1, return_indices=True)
        label = tl.where(highest > best, begin + index, label)
        best = tl.maximum(best, highest)
    return label


@jit
def view_kernel(
    Q, K, V, MEANS, LABELS, STARTS_AT, QUERIES_AT, KEYS_AT, VIEW, CENTRES, n, c, s, t, d, e, heads, group,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm, seb, seh, sab, sah, sbb, sbh,
    HAS_STARTS: tl.constexpr, EVERY: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """VIEW (lead r d): differences of queries from their centroids, scaled; CENTRES (lead d+e+1): what is taken off the
    keys and the values, and the spread of the values. heads: of the keys. HAS_STARTS: from the nearest of the queries
    at STARTS_AT (b h c) instead."""
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
    q_base, is_q = Q + batch * sqb, (at >= 0)[:, None] & wide[None, :]
    q = tl.load(q_base + (mine * sqh + at * sqn)[:, None] + dims[None, :], mask=is_q, other=0.0).to(tl.float32)
    if HAS_STARTS:
        starts = STARTS_AT + batch * seb
        mine = tl.where(ways < r, mine, head * group)  # those that are none stand with the first head's
        label = _nearest_start(q, q_base, starts, k_base, keys_at, key_centre, mine, head * group, dims, c, t, d, group,
                               sqh, sqn, skm, seh, EVERY, BK, BS, BR, FULL)  # fmt: skip
        start = tl.load(starts + mine * seh + label, mask=label >= 0, other=0)
        mean = q_base + (mine * sqh + start * sqn)[:, None] + dims[None, :]
    else:
        row = batch * heads * group + mine
        label = tl.load(LABELS + row * n + at, mask=at >= 0, other=-1)
        mean = MEANS + (row * c + label)[:, None] * d + dims[None, :]
    there = is_q & (label >= 0)[:, None]
    view = tl.where(there, q - tl.load(mean, mask=there, other=0.0).to(tl.float32), 0.0)
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
    q: Tensor, k: Tensor, v: Tensor, means: Tensor | None, labels: Tensor | None, starts_at: Tensor | None,
    queries_at: Tensor, keys_at: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v, queries_at, keys_at = rows(q), rows(k), rows(v), rows(queries_at), rows(keys_at)
    (h, n), (b, hk, _, d), e = q.shape[1:3], k.shape, v.shape[3]
    s, t, group = queries_at.shape[2], keys_at.shape[2], h // hk
    directions = torch.empty(b, hk, s * group, d, dtype=k.dtype, device=k.device)
    centres = torch.empty(b, hk, d + e + 1, dtype=torch.float32, device=k.device)
    shape = _shape(k, v, directions)
    # one program for a head, which waits for memory: few turns
    many = max(32, min(256, (16384 if narrow(k, v) else 8192) // max(shape["BD"], shape["BE"])))
    if starts_at is not None:
        means, labels, starts, c = q, queries_at, rows(starts_at), starts_at.shape[2]
    else:
        assert means is not None
        assert labels is not None
        means, labels, starts, c = means.contiguous(), labels.contiguous(), queries_at, means.shape[2]
    launch(
        view_kernel, (b * hk,), (q, k, v, means, labels, starts, queries_at, keys_at, directions, centres),
        (n, c, s, t, d, e, hk, group, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
         *starts.stride()[:2], *queries_at.stride()[:2], *keys_at.stride()[:2]),
        HAS_STARTS=starts_at is not None, EVERY=EVERY, BM=many, BK=max(32, min(64, many // 2)),
        BS=min(64, many // 2, power(c)), PRECISION="tf32", FULL=precision(k), num_warps=8, **shape,
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
