"""Queries sorted by cluster walk past their cluster's near keys and far parts, flash style; then the far values move
with the query by the slope. Any number of near keys and parts: they come in tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._types import Members
from .._jit import THIN, in_turn, jit, power, precision, registers, rows, tl, widths
from .._launch import cdiv, launch
from ..coarse import kernels as coarse
from ..coarse.arrange import in_order
from ..coarse.reference import Reach
from ..members.kernels import tiles, turns

LOG2E = 1.4426950408889634
SOFTMAX, TANGENT, CLUSTER = 0, 1, 2  # how the far part weighs, see Improved
MASSES = {"softmax": SOFTMAX, "tangent": TANGENT, "cluster": CLUSTER}
TILES = 4  # of queries in a turn; twice as many of large clusters
MANY = 512  # queries of a cluster, on average: it is large


@jit
def _gather(X, base, at, step, dims, width, real):
    """Rows of a sequence by position."""
    return tl.load(
        X + base + at.to(tl.int64)[:, None] * step + dims[None, :],
        mask=real[:, None] & (dims < width)[None, :], other=0.0,
    )  # fmt: skip


@jit
def _row(X, cluster, dims, width):
    return tl.load(X + cluster * width + dims, mask=dims < width, other=0.0).to(tl.float32)


@jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1 + tl.exp(-tl.abs(x)))


@jit
def _odds(far_lse, near_lse):
    """The far part's log-odds against the near one, for a cluster: -inf where nothing is far."""
    return tl.where(far_lse == float("-inf"), far_lse, far_lse - tl.where(near_lse == float("-inf"), 0.0, near_lse))


@jit
def _part_keys(
    MEAN, FAR, FAR_LSE, C, lead, which, c, part, parts, dims, values, d, e, scale, like: tl.constexpr,
    MASS: tl.constexpr,
):  # fmt: skip
    """A tile of far parts as keys: (p d), (p e), and what is added to their logits in base 2, -inf for an empty one."""
    there = part < parts
    at = (lead * parts + part) * c + which
    level = tl.load(FAR_LSE + at, mask=there, other=float("-inf")) * 1.4426950408889634
    v = _gather(FAR, 0, at, e, values, e, there)
    k = _gather(FAR, 0, at, 0, dims, 0, there).to(like)  # zeros
    if MASS == 1:
        k = _gather(MEAN, 0, at, d, dims, d, there).to(like)
        centroid = _row(C, lead * c + which, dims, d)
        level -= tl.sum(k.to(tl.float32) * centroid[None, :], 1) * scale
    return k, v, level


@jit
def _seen(
    K, V, NEAR, MEAN, FAR, LEVEL, FAR_LSE, k_base, v_base, lead, which, c, t, parts, slot, listed,
    dims, values, d, e, skm, svm, MASS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """What the queries of a cluster see, from one list: its near keys on the first BT slots, then the far parts; as
    keys and values, and what is added to their logits, in base 2: -inf where there is nothing."""
    near = tl.load(NEAR + (lead * c + which) * t + slot, mask=(slot < t) & listed, other=-1)
    part, is_near = slot - BT, near >= 0
    near = tl.where(is_near, near, 0)
    is_part = (part >= 0) & (part < parts) & listed
    at, there = (lead * parts + part) * c + which, is_near | is_part
    k_at, v_at = K + k_base + near[:, None] * skm, V + v_base + near[:, None] * svm
    v_at = tl.where(is_near[:, None], v_at, FAR + at[:, None] * e)
    v = tl.load(v_at + values[None, :], mask=there[:, None] & (values < e)[None, :], other=0.0)
    if MASS == 1:
        k_at = tl.where(is_near[:, None], k_at, MEAN + at[:, None] * d)
        k = tl.load(k_at + dims[None, :], mask=there[:, None] & (dims < d)[None, :], other=0.0)
        bias = tl.load(LEVEL + at, mask=is_part, other=float("-inf"))
    else:  # zeros for a part: its weight is the same for every query
        k = tl.load(k_at + dims[None, :], mask=is_near[:, None] & (dims < d)[None, :], other=0.0)
        bias = tl.load(FAR_LSE + at, mask=is_part, other=float("-inf")) * 1.4426950408889634
    return k, v, tl.where(is_near, 0.0, bias)


@jit
def _attend(q, k, v, bias, scale, highest, near_total, far_total, out, is_part, PRECISION: tl.constexpr):
    """One more tile of what a cluster sees."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias[None, :]
    new = tl.maximum(highest, tl.max(s, 1))
    level = tl.where(new == float("-inf"), 0.0, new)
    p, fade = tl.exp2(s - level[:, None]), tl.exp2(highest - level)
    out = out * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    near_total = near_total * fade + tl.sum(tl.where(is_part[None, :], 0.0, p), 1)
    far_total = far_total * fade + tl.sum(tl.where(is_part[None, :], p, 0.0), 1)
    return new, near_total, far_total, out


@jit
def fine_fwd_kernel(
    Q, K, V, C, NEAR, FAR, MEAN, FAR_LSE, LEVEL, NEAR_LSE, SLOPE, ORDER, TURNS, OUT, LSE, FAR_SHARE,
    n, turns, c, t, parts, d, e, heads, group, scale, natural_scale, per,
    sqb, sqh, sqn, skb, skh, skm, svb, svh, svm,
    MASS: tl.constexpr, HAS_SLOPE: tl.constexpr, HELD: tl.constexpr,
    BS: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A turn's queries, tile by tile. HELD: what their cluster sees is one tile, and stays. BT: slots of near keys, a
    constant so that the compiler knows which columns are near."""
    in_turn()
    lead = tl.program_id(1).to(tl.int64)
    turn = TURNS + (lead * turns + tl.program_id(0)) * 3
    which, begin, end = tl.load(turn), tl.load(turn + 1), tl.load(turn + 2)
    batch, head = lead // heads, lead % heads
    dims, values, slots = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BK)
    listed = which < c  # the last "cluster" are those without one: they see nothing
    which = tl.minimum(which, c - 1)
    cluster = lead * c + which
    many = parts
    if MASS == 2:
        many = 0
    if begin < end:
        k_base, v_base = batch * skb + (head // group) * skh, batch * svb + (head // group) * svh
        if HELD:
            held_k, held_v, held_bias = _seen(
                K, V, NEAR, MEAN, FAR, LEVEL, FAR_LSE, k_base, v_base, lead, which, c, t, many, slots, listed,
                dims, values, d, e, skm, svm, MASS, BT,
            )  # fmt: skip
        if HAS_SLOPE:
            slope = _slope(SLOPE, lead, which, c, per, dims, values, d, e).to(Q.dtype.element_ty)
            centroid = _row(C, cluster, dims, d)
        if MASS == 2:
            odds = _odds(tl.load(FAR_LSE + cluster), tl.load(NEAR_LSE + cluster))
        for first_query in range(begin, end, BS):
            place = first_query + tl.arange(0, BS)
            real = place < end
            query = tl.load(ORDER + lead * n + tl.minimum(place, end - 1))
            q = _gather(Q, batch * sqb + head * sqh, query, sqn, dims, d, real)
            highest, near_total = tl.full((BS,), float("-inf"), tl.float32), tl.zeros((BS,), tl.float32)
            far_total, out = tl.zeros((BS,), tl.float32), tl.zeros((BS, BE), tl.float32)
            if HELD:
                highest, near_total, far_total, out = _attend(
                    q, held_k, held_v, held_bias, scale, highest, near_total, far_total, out, slots >= BT, PRECISION
                )
            else:
                for first in range(0, BT + many, BK):
                    slot = first + slots
                    k, v, bias = _seen(
                        K, V, NEAR, MEAN, FAR, LEVEL, FAR_LSE, k_base, v_base, lead, which, c, t, many, slot, listed,
                        dims, values, d, e, skm, svm, MASS, BT,
                    )  # fmt: skip
                    highest, near_total, far_total, out = _attend(
                        q, k, v, bias, scale, highest, near_total, far_total, out, slot >= BT, PRECISION
                    )
            total = near_total + far_total
            safe = tl.where(total > 0, total, 1.0)
            level = tl.where(highest == float("-inf"), 0.0, highest)
            each = 1.0 / safe
            out = out * each[:, None]
            lse = tl.where(total > 0, (tl.log2(safe) + level) * 0.6931471805599453, float("-inf"))
            row = lead * n + query
            if MASS == 2:
                share = tl.where(total > 0, tl.sigmoid(odds), 0.0)
                out = out * (1 - share)[:, None] + share[:, None] * _row(FAR, cluster, values, e)[None, :]
                lse += _softplus(odds)
            if HAS_SLOPE:
                share = far_total * each
                apart = (q.to(tl.float32) - centroid[None, :]).to(q.dtype)
                out += tl.dot(apart, slope, input_precision=PRECISION) * (share * natural_scale)[:, None]
                tl.store(FAR_SHARE + row, share, mask=real)
            tl.store(
                OUT + row[:, None] * e + values[None, :], out.to(OUT.dtype.element_ty),
                mask=real[:, None] & (values < e)[None, :],
            )  # fmt: skip
            tl.store(LSE + row, lse, mask=real)


@jit
def _slope(SLOPE, lead, which, c, per, dims, values, d, e):
    """The slope of a cluster's head, or of its block."""
    place = lead
    if per > 0:
        place = lead * ((c + per - 1) // per) + which // per
    return tl.load(
        SLOPE + (place * d + dims[:, None]) * e + values[None, :], mask=(dims < d)[:, None] & (values < e)[None, :],
        other=0.0,
    )  # fmt: skip


@dataclass(frozen=True)
class FineSettings:
    """Of one call of near_and_far, besides its tensors."""

    reach: Reach
    mass: int
    detach: bool


def tiling(q: Tensor, v: Tensor, clusters: int, top: int, parts: int, most: int) -> dict[str, Any]:
    """For passes that see near keys and far parts apart."""
    d, e = widths(q, v)
    tile = max(tiles(q.shape[2], clusters, most)[0], THIN)
    keys = 64 if (d + e) * q.element_size() <= 512 else 32
    return {
        "BS": tile, "BT": min(keys, power(top, THIN)), "BP": min(keys, power(parts, THIN)), "BD": d,
        "BE": e, "PRECISION": precision(q), "num_warps": _warps(tile * (d + e) * q.element_size()),
    }  # fmt: skip


def _warps(size: int) -> int:
    """By the bytes of a tile of queries with their answers."""
    return 1 if size <= 4096 else 2 if size <= 8192 else 4 if size <= 32768 else 8


def _tiles(q: Tensor, v: Tensor, clusters: int, top: int, parts: int) -> dict[str, Any]:
    """For queries that see near keys and far parts as one list."""
    d, e = widths(q, v)
    tile, _ = tiles(q.shape[2], clusters, 64)
    width = (d + e) * q.element_size()
    near = min(power(top, least=8), cdiv(top, 64) * 64)
    held = near + parts <= 128 and width <= 512
    keys = 128 if held or width <= 256 else 64 if width <= 512 else 32
    shape = {"BS": tile, "BK": min(keys, power(near + parts, THIN)), "BT": near, "BD": d, "BE": e}
    warps = 8 if held and tile * width > 16384 else _warps(tile * width)
    return shape | {"HELD": held, "PRECISION": precision(q), "num_warps": warps, "num_stages": 2 if held else 1}


def forward(
    q: Tensor, c: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, order: Tensor, first: Tensor,
    parts: Members | None, pi: Tensor | None, settings: FineSettings,
) -> tuple[Tensor, Tensor, Tensor, coarse.Far]:  # fmt: skip
    """out, lse, each query's share of far attention (for backward, where there is a slope), and what coarse found."""
    keys, reach = in_order(k, v, keep, parts), settings.reach
    found = coarse.forward(c, keys, pi, reach, k.dtype)
    assert found.level is not None
    q, c, k, v = rows(q), c.to(k.dtype).contiguous(), keys.k, keys.v
    (b, h, n, d), (clusters, top), e = q.shape, found.near_at.shape[1:], v.shape[3]
    shape = _tiles(q, v, clusters, top, 0 if settings.mass == CLUSTER else reach.parts)
    taken = turns(first, n, shape["BS"] * (TILES if n < MANY * clusters else 2 * TILES))
    out = torch.empty(b, h, n, e, dtype=v.dtype, device=q.device)
    lse = torch.empty(b, h, n, dtype=torch.float32, device=q.device)
    share = torch.empty(b, h, n if pi is not None else 0, dtype=torch.float32, device=q.device)
    launch(
        fine_fwd_kernel, (taken.most, b * h),
        (q, k, v, c, found.near_at, found.out, found.mean_key, found.lse, found.level, found.near_lse,
        found.slope, order, taken.listed, out, lse, share),
        (n, taken.most, clusters, top, reach.parts, d, e, h, h // k.shape[1], reach.scale * LOG2E,
        reach.scale, reach.per, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        MASS=settings.mass, HAS_SLOPE=pi is not None, **registers(k, v), **shape,
    )  # fmt: skip
    return out, lse, share, found
