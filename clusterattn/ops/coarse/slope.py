"""The slope of the far values on tensor cores: one (d e) matrix per head, and what its gradient asks of the weights.

    M = sum_l omega_l (k_l - kappa)(v_l - nu)^T - sum_cj pi_c a_cj (kbar_cj - kappa)(vbar_cj - nu)^T

for any kappa and nu, also for one pair of each part: a mean far key and value keep the two sums small beside their
difference. Where parts hold few keys each, these lie much closer to one of their own than to a mean of all, and what is
rounded to half precision would drown the difference: a key from the middle of each part stands for it then. Both sums
are of one kind, keys with the weight omega and virtual keys with the weight -pi a; programs share them out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._jit import THIN, in_turn, jit, power, precision, registers, tl, widths
from .._launch import cdiv, launch
from .arrange import Arranged, rows_of
from .near import near_down
from .reference import SLOPE_CLUSTERS, Reach

if TYPE_CHECKING:
    from .kernels import Far

LOG2E = 1.4426950408889634
PROGRAMS = 396  # three to each multiprocessor of a large chip
FEW = 64  # keys of a part, on average: with fewer, in half precision, each has its own kappa and nu, which takes longer


def own(keys: Arranged, parts: int) -> bool:
    """Has each part its own kappa and nu?"""
    return keys.first is not None and keys.k.element_size() == 2 and keys.k.shape[2] < FEW * parts


@jit
def level_kernel(LSE, PI, LEVEL, rows, parts, BP: tl.constexpr, BC: tl.constexpr):
    """LEVEL (lead c): log2 of the far weight of each cluster less log2 of its share of the queries, so that
    2**(score - LEVEL) = pi a p. inf for a cluster without either."""
    in_turn()
    lead, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BC + tl.arange(0, BC)
    here, part = row < rows, tl.arange(0, BP)
    highest, total = tl.full((BC,), float("-inf"), tl.float32), tl.zeros((BC,), tl.float32)
    for first in range(0, parts, BP):
        mask = (first + part < parts)[:, None] & here[None, :]
        at = (lead * parts + first + part)[:, None] * rows + row[None, :]
        lse = tl.load(LSE + at, mask=mask, other=float("-inf"))
        new = tl.maximum(highest, tl.max(lse, 0))
        level = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(highest - level) + tl.sum(tl.exp(lse - level[None, :]), 0)
        highest = new
    pi = tl.load(PI + lead * rows + row, mask=here, other=0.0)
    there = (total > 0) & (pi > 0)
    level = tl.where(highest == float("-inf"), 0.0, highest) * 1.4426950408889634
    level += tl.log2(tl.where(there, total, 1.0)) - tl.log2(tl.where(there, pi, 1.0))
    tl.store(LEVEL + lead * rows + row, tl.where(there, level, float("inf")), mask=here)


@jit
def part_of(FIRST, place, parts, BP: tl.constexpr):
    """The part of the key that stands at each place; the last one for those past the end."""
    found, part = tl.zeros(place.shape, tl.int32), tl.arange(0, BP)
    for low in range(0, parts, BP):
        end = tl.load(FIRST + low + part + 1, mask=low + part < parts, other=0x7FFFFFFF)
        found += tl.sum((end[None, :] <= place[:, None]).to(tl.int32), 1)
    return tl.minimum(found, parts - 1)


@jit
def middle(FIRST, part, m):
    """Where in the order of the parts a key stands that lies in the middle of a part; any key where it has none."""
    return tl.minimum((tl.load(FIRST + part) + tl.load(FIRST + part + 1)) // 2, m - 1)


@jit
def rows_at(X, at, stride, columns, width):
    """Rows of keys or values, in fp32."""
    at = at.to(tl.int64)[:, None] * stride
    return tl.load(X + at + columns[None, :], mask=(columns < width)[None, :], other=0.0).to(tl.float32)


@jit
def slope_kernel(
    C, K, V, KEEP, ORDER, FIRST, BITS, MEAN, OUT, LSE, LEVEL, PART,
    rows, m, d, e, heads, group, scale, per, first, step, words, parts, few, of_keys, splits, stretch, row_stretch,
    skb, skh, skm, svb, svh, svm, seb, seh,
    HAS_KEEP: tl.constexpr, HAS_NEAR: tl.constexpr, BY_ORDER: tl.constexpr, OWN: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PART (lead blocks splits d e): the first of_keys splits go over keys, the others over virtual keys. OWN: each
    part has its own kappa and nu."""
    in_turn()
    split, block, lead = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    key_lead = batch * (heads // group) + head
    first_of = FIRST + key_lead * (parts + 2)
    dims, values, tile = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BM)
    wide, long = dims < d, values < e
    k_base, v_base = K + batch * skb + head * skh, V + batch * svb + head * svh
    begin, end = block * per, (block + 1) * per  # the block's clusters
    centre = lead * parts * rows + begin  # of the first part
    kappa = tl.load(MEAN + centre * d + dims, mask=wide, other=0.0).to(tl.float32)
    nu = tl.load(OUT + centre * e + values, mask=long, other=0.0).to(tl.float32)
    limit = m
    if per == 0:
        end = rows
    else:
        limit = tl.minimum(tl.maximum(first + block * step, 0), m)
    end = tl.minimum(tl.minimum(end, rows), begin + few)
    total = tl.zeros((BD, BE), tl.float32)
    if split < of_keys:
        row = begin + tl.arange(0, BC)  # all of the few: nothing but the keys is read in the loop, and they ahead
        c = tl.load(
            C + (lead * rows + row[:, None]) * d + dims[None, :], mask=(row < end)[:, None] & wide[None, :], other=0.0
        )
        level = tl.load(LEVEL + lead * rows + row, mask=row < end, other=float("inf"))
        low = split * stretch
        for start in range(low, tl.minimum(low + stretch, limit), BM):
            seen = start + tile < limit
            key = rows_of(ORDER, key_lead, start + tile, m, BY_ORDER)
            at = key.to(tl.int64)[:, None]
            k = tl.load(k_base + at * skm + dims[None, :], mask=seen[:, None] & wide[None, :], other=0.0)
            v = tl.load(v_base + at * svm + values[None, :], mask=seen[:, None] & long[None, :], other=0.0)
            if HAS_KEEP:
                seen = seen & (tl.load(KEEP + batch * seb + head * seh + key, mask=seen, other=0) != 0)
            w = tl.exp2(tl.dot(k, tl.trans(c), input_precision=PRECISION) * scale - level[None, :])
            if HAS_NEAR:
                w = tl.where(near_down(BITS, lead, row, rows, words, start, tile), 0.0, w)
            weight = tl.where(seen, tl.sum(w, 1), 0.0)[:, None]
            of_k, of_v = kappa[None, :], nu[None, :]
            if OWN:
                near_it = middle(first_of, part_of(first_of, start + tile, parts, 32), m)
                near_it = rows_of(ORDER, key_lead, near_it, m, BY_ORDER)
                of_k, of_v = rows_at(k_base, near_it, skm, dims, d), rows_at(v_base, near_it, svm, values, e)
            x = ((k.to(tl.float32) - of_k) * weight).to(k.dtype)
            y = tl.where(seen[:, None], v.to(tl.float32) - of_v, 0.0).to(v.dtype)
            total += tl.dot(tl.trans(x), y, input_precision=PRECISION)
    else:
        size = end - begin
        low = (split - of_keys) * row_stretch
        for start in range(low, tl.minimum(low + row_stretch, parts * size), BM):
            place = start + tile
            there = place < parts * size
            row = begin + place % size
            at = (lead * parts + place // size) * rows + row
            lse = tl.load(LSE + at, mask=there, other=float("-inf"))
            level = tl.load(LEVEL + lead * rows + row, mask=there, other=float("inf"))
            weight = tl.where(there, tl.exp2(lse * 1.4426950408889634 - level), 0.0)[:, None]
            x = tl.load(MEAN + at[:, None] * d + dims[None, :], mask=there[:, None] & wide[None, :], other=0.0)
            y = tl.load(OUT + at[:, None] * e + values[None, :], mask=there[:, None] & long[None, :], other=0.0)
            of_k, of_v = kappa[None, :], nu[None, :]
            if OWN:
                near_it = middle(first_of, tl.minimum(place // size, parts - 1), m)
                near_it = rows_of(ORDER, key_lead, near_it, m, BY_ORDER)
                of_k, of_v = rows_at(k_base, near_it, skm, dims, d), rows_at(v_base, near_it, svm, values, e)
            x, y = x.to(tl.float32) - of_k, y.to(tl.float32) - of_v
            x, y = tl.where(weight > 0, x * weight, 0.0), tl.where(weight > 0, y, 0.0)
            total -= tl.dot(tl.trans(x.to(K.dtype.element_ty)), y.to(V.dtype.element_ty), input_precision=PRECISION)
    to = ((lead * tl.num_programs(1) + block) * splits + split) * d
    tl.store(PART + (to + dims[:, None]) * e + values[None, :], total, mask=wide[:, None] & long[None, :])


@jit
def added_kernel(PART, TOTAL, size, splits, BS: tl.constexpr, BX: tl.constexpr):
    """TOTAL (lead size): the sum of PART (lead splits size), split by split."""
    in_turn()
    lead, at, split = tl.program_id(1).to(tl.int64), tl.program_id(0) * BX + tl.arange(0, BX), tl.arange(0, BS)
    total = tl.zeros((BX,), tl.float32)
    for first in range(0, splits, BS):
        mask = (first + split < splits)[:, None] & (at < size)[None, :]
        place = (lead * splits + first + split)[:, None] * size + at[None, :]
        total += tl.sum(tl.load(PART + place, mask=mask, other=0.0), 0)
    tl.store(TOTAL + lead * size + at, total.to(TOTAL.dtype.element_ty), mask=at < size)


def added(part: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(lead splits d e) -> (lead d e)."""
    lead, splits, d, e = part.shape
    total = torch.empty(lead, d, e, dtype=dtype, device=part.device)
    launch(
        added_kernel, (cdiv(d * e, 256), lead), (part, total), (d * e, splits),
        BS=min(16, power(splits, least=1)), BX=256, num_warps=4,
    )  # fmt: skip
    return total


@jit
def shares_kernel(COUNTS, OUT, c, per, few, BC: tl.constexpr):
    """OUT: each of the first few clusters' share of their block's queries, 0 for the others."""
    in_turn()
    block, lead, which = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BC)
    at = lead * c + block * per + which
    count = tl.load(COUNTS + at, mask=which < few, other=0).to(tl.float32)
    tl.store(OUT + at, count / tl.maximum(tl.sum(count, 0), 1.0), mask=which < few)
    for first in range(0, per, BC):
        rest = first + which
        tl.store(OUT + lead * c + block * per + rest, tl.zeros((BC,), tl.float32), mask=(rest >= few) & (rest < per))


def shares(counts: Tensor, like: Tensor, per: int) -> Tensor:
    """counts (b h c) of blocks of ``per`` clusters."""
    counts = counts.contiguous()
    (b, h, c), few = counts.shape, min(SLOPE_CLUSTERS, per)
    out = torch.empty(b, h, c, dtype=torch.float32, device=counts.device)
    launch(shares_kernel, (c // per, b * h), (counts, out), (c, per, few), BC=power(SLOPE_CLUSTERS), num_warps=1)
    return out


def _sizes(keys: Arranged) -> dict[str, Any]:
    d, e = widths(keys.k, keys.v)
    width = (d + e) * keys.k.element_size()
    return {"BM": 64 if width <= 512 else 32, "BD": d, "BE": e}


def levels(lse: Tensor, pi: Tensor) -> Tensor:
    """lse (lead p c), pi (b h c) -> LEVEL (lead c), see level_kernel."""
    lead, parts, clusters = lse.shape
    level = torch.empty(lead, clusters, dtype=torch.float32, device=lse.device)
    launch(
        level_kernel,
        (cdiv(clusters, 64), lead),
        (lse, pi.float().contiguous(), level),
        (clusters, parts),
        BP=min(64, power(parts, least=1)),
        BC=64,
        num_warps=4,
    )
    return level


def slope_of(found: Far, c: Tensor, keys: Arranged, pi: Tensor, reach: Reach) -> Far:
    """What was found, with the slope."""
    k, v, parts = keys.k, keys.v, reach.parts
    (b, h, clusters, d), (hk, m, e) = c.shape, v.shape[1:]
    lead, blocks = b * h, -(-clusters // reach.per) if reach.per else 1
    level, tile = levels(found.lse, pi), _sizes(keys)
    virtual = parts * min(reach.per or clusters, SLOPE_CLUSTERS)
    programs = max(2, PROGRAMS // (lead * blocks))  # all at the same time: none starts when others end
    # a virtual row, whose weights are read and not made anew, but one by one, takes as long as two keys
    of_rows = max(1, min(programs * 2 * virtual // (m + 2 * virtual), -(-virtual // (2 * tile["BM"]))))
    of_keys = max(1, min(programs - of_rows, -(-m // (2 * tile["BM"]))))
    stretch, row_stretch = (
        -(-size // (count * tile["BM"])) * tile["BM"] for size, count in ((m, of_keys), (virtual, of_rows))
    )
    part = torch.empty(lead, blocks, of_keys + of_rows, d, e, dtype=torch.float32, device=k.device)
    ahead = (tile["BD"] + tile["BE"]) * k.element_size() <= 1024  # is there room for keys to come?
    by_part = own(keys, parts)  # otherwise keys are read as they came
    bits = found.bits if by_part or found.came is None else found.came
    launch(
        slope_kernel, (of_keys + of_rows, blocks, lead),
        (c, k, v, keys.keep_or(c), keys.order_or(c), keys.first_or(c), bits, found.mean_key, found.out, found.lse,
        level, part),
        (clusters, m, d, e, h, h // hk, reach.scale * LOG2E, reach.per, reach.first, reach.step, (m + 31) // 32, parts,
        SLOPE_CLUSTERS, of_keys, of_keys + of_rows, stretch, row_stretch,
        *k.stride()[:3], *v.stride()[:3], *keys.keep_strides),
        HAS_KEEP=keys.keep is not None, HAS_NEAR=found.near_at.shape[-1] > 0, BY_ORDER=by_part, OWN=by_part,
        BC=power(min(SLOPE_CLUSTERS, reach.per or clusters), THIN), PRECISION=precision(k),
        num_warps=8 if tile["BD"] > 64 or k.element_size() > 2 else 4, num_stages=3 if ahead else 1,
        **registers(k, v), **tile,
    )  # fmt: skip
    return replace(found, slope=added(part.flatten(0, 1), k.dtype).view(lead, blocks, d, e))
