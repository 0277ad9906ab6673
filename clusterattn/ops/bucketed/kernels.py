"""Attention inside buckets: a tile of gathered queries walks over its bucket's gathered keys, flash style.

Where a query has seats in several rounds, every seat writes its own answer and a second kernel joins them in the order
of the rounds. Gradients of keys are written seat by seat as well and added up by a sorted list of each key's seats: no
atomics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._jit import jit, power, precision, rows, tl, why_no_kernels
from .._jit import triton as _triton

if TYPE_CHECKING:
    from .reference import Seating

LOG2E = 1.4426950408889634


@jit
def _visible(query, key, offset, left, right, OTHERS: tl.constexpr):
    """May the query at this position see the key at that one? Empty seats (-1) see nothing."""
    ahead = key[None, :] - (query + offset)[:, None]
    seen = (key >= 0)[None, :] & (query >= 0)[:, None]
    seen = seen & ((right < 0) | (ahead <= right)) & ((left < 0) | (ahead >= -left))
    if OTHERS:
        seen = seen & (ahead != 0)
    return seen


@jit
def _meetings(LOW, HIGH, RANK, lead, query, key, n, m, rounds):
    """log2 of the number of rounds in which each pair meets."""
    met = tl.zeros((query.shape[0], key.shape[0]), tl.int32)
    for one in range(rounds):
        low = tl.load(LOW + (lead * rounds + one) * n + query, mask=query >= 0, other=0)
        high = tl.load(HIGH + (lead * rounds + one) * n + query, mask=query >= 0, other=0)
        rank = tl.load(RANK + (lead * rounds + one) * m + key, mask=key >= 0, other=-1)
        met += ((rank[None, :] >= low[:, None]) & (rank[None, :] < high[:, None])).to(tl.int32)
    return tl.log2(tl.maximum(met, 1).to(tl.float32))


@jit
def bucketed_fwd_kernel(
    Q, K, V, BIAS, QUERIES, KEYS, LOW, HIGH, RANK, OUT, LSE,
    n, m, d, e, g, s, z, rounds, heads, group, scale, offset, left, right,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm,
    HAS_BIAS: tl.constexpr, HAS_MEETINGS: tl.constexpr, OTHERS: tl.constexpr, ONCE: tl.constexpr,
    BS: tl.constexpr, BZ: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bucket, lead = tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, lead % heads
    seat, dims, values = tl.program_id(0) * BS + tl.arange(0, BS), tl.arange(0, BD), tl.arange(0, BE)
    row = (lead * g + bucket) * s + seat
    query = tl.load(QUERIES + row, mask=seat < s, other=-1)
    q = tl.load(
        Q + batch * sqb + head * sqh + query[:, None] * sqn + dims[None, :],
        mask=(query >= 0)[:, None] & (dims < d)[None, :],
        other=0.0,
    )
    highest, total, out = (
        tl.full((BS,), float("-inf"), tl.float32),
        tl.zeros((BS,), tl.float32),
        tl.zeros((BS, BE), tl.float32),
    )
    for first in range(0, z, BZ):
        place = first + tl.arange(0, BZ)
        key = tl.load(KEYS + (lead * g + bucket) * z + place, mask=place < z, other=-1)
        kv = batch * skb + (head // group) * skh
        k = tl.load(
            K + kv + key[:, None] * skm + dims[None, :], mask=(key >= 0)[:, None] & (dims < d)[None, :], other=0.0
        )
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_BIAS:
            logits += tl.load(BIAS + lead * m + key, mask=key >= 0, other=0.0)[None, :] * 1.4426950408889634
        if HAS_MEETINGS:
            logits -= _meetings(LOW, HIGH, RANK, lead, query, key, n, m, rounds)
        logits = tl.where(_visible(query, key, offset, left, right, OTHERS), logits, float("-inf"))
        new = tl.maximum(highest, tl.max(logits, 1))
        level = tl.where(new == float("-inf"), 0.0, new)
        p, fade = tl.exp2(logits - level[:, None]), tl.exp2(highest - level)
        highest, total = new, total * fade + tl.sum(p, 1)
        v = tl.load(
            V + batch * svb + (head // group) * svh + key[:, None] * svm + values[None, :],
            mask=(key >= 0)[:, None] & (values < e)[None, :],
            other=0.0,
        )
        out = out * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    some = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, (tl.log2(some) + highest) * 0.6931471805599453, float("-inf"))
    to, there = row, seat < s
    if ONCE:
        to, there = lead * n + query, query >= 0
    tl.store(
        OUT + to[:, None] * e + values[None, :],
        (out / some[:, None]).to(OUT.dtype.element_ty),
        mask=there[:, None] & (values < e)[None, :],
    )
    tl.store(LSE + to, lse, mask=there)


@jit
def join_kernel(SEATS, PART, PART_LSE, OUT, LSE, n, e, rounds, BN: tl.constexpr, BE: tl.constexpr):
    """The answers of a query's seats into one, in the order of the rounds."""
    lead, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BN + tl.arange(0, BN)
    values = tl.arange(0, BE)
    highest = tl.full((BN,), float("-inf"), tl.float32)
    for one in range(rounds):
        seat = tl.load(SEATS + (lead * rounds + one) * n + at, mask=at < n, other=-1)
        highest = tl.maximum(highest, tl.load(PART_LSE + seat, mask=seat >= 0, other=float("-inf")))
    level = tl.where(highest == float("-inf"), 0.0, highest)
    total, out = tl.zeros((BN,), tl.float32), tl.zeros((BN, BE), tl.float32)
    for one in range(rounds):
        seat = tl.load(SEATS + (lead * rounds + one) * n + at, mask=at < n, other=-1)
        weight = tl.exp(tl.load(PART_LSE + seat, mask=seat >= 0, other=float("-inf")) - level)
        total += weight
        part = tl.load(
            PART + seat[:, None] * e + values[None, :], mask=(seat >= 0)[:, None] & (values < e)[None, :], other=0.0
        )
        out += weight[:, None] * part.to(tl.float32)
    some = tl.where(total > 0, total, 1.0)
    to = lead * n + at
    tl.store(
        OUT + to[:, None] * e + values[None, :],
        (out / some[:, None]).to(OUT.dtype.element_ty),
        mask=(at < n)[:, None] & (values < e)[None, :],
    )
    tl.store(LSE + to, tl.where(total > 0, tl.log(some) + level, float("-inf")), mask=at < n)


@jit
def gather_sum_kernel(ORDER, START, PART, OUT, rows, total, d, BR: tl.constexpr, BD: tl.constexpr):
    """OUT[i] = the sum of PART[ORDER[j]] for j in START[i]..START[i+1], in that order."""
    lead, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BR + tl.arange(0, BR)
    dims, here = tl.arange(0, BD), at < rows
    first = tl.load(START + lead * (rows + 1) + at, mask=here, other=0).to(tl.int32)
    last = tl.load(START + lead * (rows + 1) + at + 1, mask=here, other=0).to(tl.int32)
    out = tl.zeros((BR, BD), tl.float32)
    for step in range(tl.max(last - first, axis=0)):
        turn = first + step
        more = turn < last
        seat = tl.load(
            ORDER + (lead * total + tl.minimum(turn, total - 1))
        )  # in bounds; a masked load trips Triton 3.6
        part = tl.load(
            PART + (lead * total + seat)[:, None] * d + dims[None, :],
            mask=more[:, None] & (dims < d)[None, :],
            other=0.0,
        )
        out += part.to(tl.float32)
    tl.store(
        OUT + (lead * rows + at)[:, None] * d + dims[None, :],
        out.to(OUT.dtype.element_ty),
        mask=here[:, None] & (dims < d)[None, :],
    )


@jit
def delta_kernel(OUT, DY, D_LSE, LSE, DELTA, BASE2, rows, e, BN: tl.constexpr, BE: tl.constexpr):
    """rowsum(out * d_out) - d_lse, and the log-weights in base 2 with 0 for rows that saw nothing."""
    at = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    values = tl.arange(0, BE)
    mask = (at < rows)[:, None] & (values < e)[None, :]
    out = tl.load(OUT + at[:, None] * e + values[None, :], mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(DY + at[:, None] * e + values[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(DELTA + at, tl.sum(out * dy, 1) - tl.load(D_LSE + at, mask=at < rows, other=0.0), mask=at < rows)
    lse = tl.load(LSE + at, mask=at < rows, other=0.0)
    tl.store(BASE2 + at, tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634), mask=at < rows)


@jit
def _gradient_of_logits(
    q, k, v, dy, lse, delta, query, key, BIAS, LOW, HIGH, RANK, lead, n, m, rounds, scale, offset, left, right,
    HAS_BIAS: tl.constexpr, HAS_MEETINGS: tl.constexpr, OTHERS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights and gradient of the logits of a tile: (queries keys) twice."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_BIAS:
        logits += tl.load(BIAS + lead * m + key, mask=key >= 0, other=0.0)[None, :] * 1.4426950408889634
    if HAS_MEETINGS:
        logits -= _meetings(LOW, HIGH, RANK, lead, query, key, n, m, rounds)
    p = tl.where(_visible(query, key, offset, left, right, OTHERS), tl.exp2(logits - lse[:, None]), 0.0)
    dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@jit
def bucketed_bwd_q_kernel(
    Q, K, V, BIAS, QUERIES, KEYS, LOW, HIGH, RANK, DY, BASE2, DELTA, DQ,
    n, m, d, e, g, s, z, rounds, heads, group, scale, natural_scale, offset, left, right,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm,
    HAS_BIAS: tl.constexpr, HAS_MEETINGS: tl.constexpr, OTHERS: tl.constexpr, ONCE: tl.constexpr,
    BS: tl.constexpr, BZ: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bucket, lead = tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, lead % heads
    seat, dims, values = tl.program_id(0) * BS + tl.arange(0, BS), tl.arange(0, BD), tl.arange(0, BE)
    row = (lead * g + bucket) * s + seat
    query = tl.load(QUERIES + row, mask=seat < s, other=-1)
    real, mine = query >= 0, lead * n + query
    q = tl.load(
        Q + batch * sqb + head * sqh + query[:, None] * sqn + dims[None, :],
        mask=real[:, None] & (dims < d)[None, :],
        other=0.0,
    )
    dy = tl.load(DY + mine[:, None] * e + values[None, :], mask=real[:, None] & (values < e)[None, :], other=0.0)
    lse, delta = tl.load(BASE2 + mine, mask=real, other=0.0), tl.load(DELTA + mine, mask=real, other=0.0)
    dq = tl.zeros((BS, BD), tl.float32)
    for first in range(0, z, BZ):
        place = first + tl.arange(0, BZ)
        key = tl.load(KEYS + (lead * g + bucket) * z + place, mask=place < z, other=-1)
        there = (key >= 0)[:, None]
        k = tl.load(
            K + batch * skb + (head // group) * skh + key[:, None] * skm + dims[None, :],
            mask=there & (dims < d)[None, :],
            other=0.0,
        )
        v = tl.load(
            V + batch * svb + (head // group) * svh + key[:, None] * svm + values[None, :],
            mask=there & (values < e)[None, :],
            other=0.0,
        )
        p, ds = _gradient_of_logits(
            q, k, v, dy, lse, delta, query, key, BIAS, LOW, HIGH, RANK, lead, n, m, rounds, scale, offset, left, right,
            HAS_BIAS, HAS_MEETINGS, OTHERS, PRECISION,
        )  # fmt: skip
        dq += tl.dot((ds * natural_scale).to(k.dtype), k, input_precision=PRECISION)
    to, kept = row, seat < s
    if ONCE:
        to, kept = mine, real
    tl.store(DQ + to[:, None] * d + dims[None, :], dq.to(DQ.dtype.element_ty), mask=kept[:, None] & (dims < d)[None, :])


@jit
def bucketed_bwd_kv_kernel(
    Q, K, V, BIAS, QUERIES, KEYS, FIRST, LOW, HIGH, RANK, DY, BASE2, DELTA, DK, DV, D_BIAS,
    n, m, d, e, g, s, z, rounds, heads, group, scale, natural_scale, offset, left, right,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm,
    HAS_BIAS: tl.constexpr, HAS_MEETINGS: tl.constexpr, OTHERS: tl.constexpr, SHARED: tl.constexpr,
    BS: tl.constexpr, BZ: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys. SHARED: neighbouring buckets that sit with the same keys (FIRST[i] to FIRST[i+1])
    are gone through by one program, which writes to the keys themselves; otherwise each bucket writes to its own seats.
    """
    which, lead = tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, lead % heads
    place, dims, values = tl.program_id(0) * BZ + tl.arange(0, BZ), tl.arange(0, BD), tl.arange(0, BE)
    bucket, stop = which, which + 1
    if SHARED:
        families = tl.num_programs(1)
        bucket = tl.load(FIRST + lead * (families + 1) + which).to(tl.int32)
        stop = tl.load(FIRST + lead * (families + 1) + which + 1).to(tl.int32)
        key = tl.where(place < z, (which * z + place).to(tl.int64), -1)
    else:
        key = tl.load(KEYS + (lead * g + which) * z + place, mask=place < z, other=-1)
    there = (key >= 0)[:, None]
    k = tl.load(
        K + batch * skb + (head // group) * skh + key[:, None] * skm + dims[None, :],
        mask=there & (dims < d)[None, :],
        other=0.0,
    )
    v = tl.load(
        V + batch * svb + (head // group) * svh + key[:, None] * svm + values[None, :],
        mask=there & (values < e)[None, :],
        other=0.0,
    )
    dk, dv, d_bias = tl.zeros((BZ, BD), tl.float32), tl.zeros((BZ, BE), tl.float32), tl.zeros((BZ,), tl.float32)
    for turn in range(bucket * s, stop * s, BS):
        seat = turn + tl.arange(0, BS)
        query = tl.load(QUERIES + lead * g * s + seat, mask=seat < stop * s, other=-1)
        real, mine = query >= 0, lead * n + query
        q = tl.load(
            Q + batch * sqb + head * sqh + query[:, None] * sqn + dims[None, :],
            mask=real[:, None] & (dims < d)[None, :],
            other=0.0,
        )
        dy = tl.load(DY + mine[:, None] * e + values[None, :], mask=real[:, None] & (values < e)[None, :], other=0.0)
        lse, delta = tl.load(BASE2 + mine, mask=real, other=0.0), tl.load(DELTA + mine, mask=real, other=0.0)
        p, ds = _gradient_of_logits(
            q, k, v, dy, lse, delta, query, key, BIAS, LOW, HIGH, RANK, lead, n, m, rounds, scale, offset, left, right,
            HAS_BIAS, HAS_MEETINGS, OTHERS, PRECISION,
        )  # fmt: skip
        dv += tl.dot(tl.trans(p.to(dy.dtype)), dy, input_precision=PRECISION)
        dk += tl.dot(tl.trans((ds * natural_scale).to(q.dtype)), q, input_precision=PRECISION)
        if HAS_BIAS:
            d_bias += tl.sum(ds, 0)
    out = (lead * tl.num_programs(1) + which) * z + place
    tl.store(
        DK + out[:, None] * d + dims[None, :],
        dk.to(DK.dtype.element_ty),
        mask=(place < z)[:, None] & (dims < d)[None, :],
    )
    tl.store(
        DV + out[:, None] * e + values[None, :],
        dv.to(DV.dtype.element_ty),
        mask=(place < z)[:, None] & (values < e)[None, :],
    )
    if HAS_BIAS:
        tl.store(D_BIAS + out, d_bias, mask=place < z)


def why_not(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, rounds: int) -> str | None:
    if 0 in q.shape or 0 in k.shape or 0 in v.shape or 0 in queries.shape or 0 in keys.shape:
        return "there is nothing to launch for an empty tensor"
    if rounds < 1:
        return "a query may sit in any number of buckets here, and a kernel must know how many"
    if queries.shape[2] > 65535:
        return f"a launch has room for 65535 buckets, there are {queries.shape[2]}"
    if v.shape[-1] > 256:
        return f"kernels hold value dimensions up to 256, this one is {v.shape[-1]}"
    return why_no_kernels(q)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, how: Seating
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, ...], dict[str, object]]:
    """What all kernels of a call are given: tensors, sizes, strides and tiles."""
    (h, n, d), (hk, m, e) = q.shape[1:], v.shape[1:]
    (g, s), z = how.queries.shape[2:], how.keys.shape[3]
    bias, low, high, rank = (x if x is not None else q for x in (how.bias, how.low, how.high, how.rank))
    tensors = (q, k, v, bias, how.queries, how.keys, low, high, rank)
    rounds = how.low.shape[2] if how.low is not None else 1
    sizes = (n, m, d, e, g, s, z, rounds, h, h // hk)
    most = 64 if power(d) + power(e) <= 256 else 32
    tiles: dict[str, object] = {
        "BS": min(most, power(s)), "BZ": min(most, power(z)), "BD": power(d), "BE": power(e),
        "HAS_BIAS": how.bias is not None, "HAS_MEETINGS": how.low is not None, "OTHERS": how.others,
        "PRECISION": precision(q), "num_warps": 4,
    }  # fmt: skip
    return tensors, sizes, (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]), tiles


def _plain(how: Seating) -> Seating:
    """Tables as the kernels read them: contiguous."""
    from dataclasses import replace

    tables = {name: getattr(how, name) for name in ("queries", "keys", "bias", "low", "high", "rank")}
    return replace(how, **{name: x.contiguous() for name, x in tables.items() if x is not None})


def _seats(queries: Tensor, n: int, rounds: int) -> Tensor:
    """The flat seat of every query in every round (lead rounds n), -1 where it has none."""
    b, h, g, s = queries.shape
    flat = queries.reshape(b * h * rounds, -1)
    seats = torch.arange(flat.numel(), device=flat.device).view_as(flat)
    found = torch.full((b * h * rounds, n + 1), -1, dtype=torch.int64, device=flat.device)
    return found.scatter_(1, torch.where(flat < 0, n, flat), seats)[:, :n].contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, how: Seating, rounds: int) -> tuple[Tensor, Tensor]:
    q, k, v, how = rows(q), rows(k), rows(v), _plain(how)
    (b, h, n, _), e = q.shape, v.shape[3]
    tensors, sizes, strides, tiles = _launch(q, k, v, how)
    (g, s), once = how.queries.shape[2:], rounds == 1
    out = torch.zeros(b, h, n, e, dtype=v.dtype, device=q.device)
    lse = torch.full((b, h, n), float("-inf"), dtype=torch.float32, device=q.device)
    part, part_lse = out, lse
    if not once:
        part = torch.empty(b * h * g * s, e, dtype=v.dtype, device=q.device)
        part_lse = torch.empty(b * h * g * s, dtype=torch.float32, device=q.device)
    numbers = (*sizes, how.scale * LOG2E, how.offset, how.left, how.right, *strides)
    bucketed_fwd_kernel[(_triton.cdiv(s, tiles["BS"]), g, b * h)](
        *tensors, part, part_lse, *numbers, ONCE=once, **tiles
    )
    if not once:
        tile = 32
        join_kernel[(_triton.cdiv(n, tile), b * h)](
            _seats(how.queries, n, rounds), part, part_lse, out, lse, n, e, rounds, BN=tile, BE=tiles["BE"], num_warps=4
        )
    return out, lse


def backward(
    d_out: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Seating, rounds: int,
    families: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """families (b h c+1): bucket numbers at which the keys of cluster i begin, where buckets come in such families and
    the keys of family i are i*z ... (i+1)*z."""
    q, k, v, how = rows(q), rows(k), rows(v), _plain(how)
    (b, h, n, d), (hk, m, e) = q.shape, v.shape[1:]
    lead, (g, s), z = b * h, how.queries.shape[2:], how.keys.shape[3]
    tensors, sizes, strides, tiles = _launch(q, k, v, how)
    dy = d_out.to(v.dtype).contiguous()
    delta, base2 = torch.empty_like(lse), torch.empty_like(lse)
    delta_kernel[(_triton.cdiv(lead * n, 64),)](
        out, dy, d_lse.contiguous(), lse, delta, base2, lead * n, e, BN=64, BE=tiles["BE"], num_warps=4
    )
    numbers = (*sizes, how.scale * LOG2E, how.scale, how.offset, how.left, how.right, *strides)
    once = rounds == 1
    dq = torch.zeros(b, h, n, d, dtype=q.dtype, device=q.device)
    part = dq if once else torch.empty(lead * g * s, d, dtype=q.dtype, device=q.device)
    bucketed_bwd_q_kernel[(_triton.cdiv(s, tiles["BS"]), g, lead)](
        *tensors, dy, base2, delta, part, *numbers, ONCE=once, **tiles
    )
    if not once:
        dq = gather_sum(how.queries, n, part, d).view(b, h, n, d)
    buckets = g if families is None else families.shape[-1] - 1
    dk = torch.empty(lead, buckets * z, d, dtype=k.dtype, device=q.device)
    dv = torch.empty(lead, buckets * z, e, dtype=v.dtype, device=q.device)
    d_bias = torch.empty(lead, buckets * z if how.bias is not None else 0, dtype=torch.float32, device=q.device)
    first = families.contiguous() if families is not None else how.queries
    bucketed_bwd_kv_kernel[(_triton.cdiv(z, tiles["BZ"]), buckets, lead)](
        *tensors[:6], first, *tensors[6:], dy, base2, delta, dk, dv, d_bias,
        *numbers, SHARED=families is not None, **tiles,
    )  # fmt: skip
    if families is None:
        dk, dv = (gather_sum(how.keys, m, part, part.shape[-1]) for part in (dk, dv))
        if how.bias is not None:
            d_bias = gather_sum(how.keys, m, d_bias, 1)
    if hk != h:  # the query heads of a key head, in their order
        dk, dv = (x.view(b, hk, h // hk, m, -1).float().sum(2) for x in (dk, dv))
    return dq, dk.view(b, hk, m, d), dv.view(b, hk, m, e), d_bias.view(b, h, -1)


def gather_sum(table: Tensor, length: int, part: Tensor, d: int) -> Tensor:
    """Add up what stands at each token's seats: table (b h g s), part (lead g*s d) -> (lead length d)."""
    b, h, g, s = table.shape
    tokens, order = torch.where(table < 0, length, table).view(b * h, g * s).sort(dim=-1, stable=True)
    start = torch.searchsorted(tokens, torch.arange(length + 1, device=table.device).expand(b * h, -1).contiguous())
    total = torch.empty(b * h, length, d, dtype=part.dtype, device=part.device)
    gather_sum_kernel[(_triton.cdiv(length, 32), b * h)](
        order, start, part, total, length, g * s, d, BR=32, BD=power(d), num_warps=4
    )
    return total
