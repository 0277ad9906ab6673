"""Each centroid's near keys: scores go to memory once; a binary search over their bits finds each row's threshold (no
sort); the chosen keys become a list and a bit mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import jit, power, precision, tl
from .._jit import triton as _triton
from .reference import Reach

SEGMENT = 1024  # scores of one row that one program, of one warp, searches


@jit
def _limit(row, m, per, first, step):
    """How many keys a row may see."""
    prefix = tl.minimum(tl.maximum(first + (row // tl.maximum(per, 1)) * step, 0), m)
    return tl.where(per == 0, m, prefix)


@jit
def scores_kernel(
    C, K, KEEP, SCORES, rows, m, d, heads, group, scale, per, first, step, skb, skh, skm,
    HAS_KEEP: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lead = tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    row, key, dims = (
        tl.program_id(1) * BC + tl.arange(0, BC),
        tl.program_id(0) * BM + tl.arange(0, BM),
        tl.arange(0, BD),
    )
    c = tl.load(
        C + (lead * rows + row[:, None]) * d + dims[None, :],
        mask=(row[:, None] < rows) & (dims[None, :] < d),
        other=0.0,
    )
    k = tl.load(
        K + batch * skb + head * skh + key.to(tl.int64)[:, None] * skm + dims[None, :],
        mask=(key[:, None] < m) & (dims[None, :] < d), other=0.0,
    )  # fmt: skip
    s = tl.dot(c, tl.trans(k), input_precision=PRECISION) * scale
    s = tl.minimum(tl.maximum(s, -60000.0), 60000.0)  # the range of fp16
    seen = key[None, :] < _limit(row, m, per, first, step)[:, None]
    if HAS_KEEP:
        seen = seen & (tl.load(KEEP + batch * m + key, mask=key < m, other=0) != 0)[None, :]
    s = tl.where(seen, s, float("-inf"))
    tl.store(
        SCORES + (lead * rows + row[:, None]) * m + key[None, :],
        s.to(SCORES.dtype.element_ty),
        mask=(row[:, None] < rows) & (key[None, :] < m),
    )


@jit
def _threshold(u, top, WIDTH: tl.constexpr):
    """The top-th largest of the numbers u, of WIDTH bits each, bit by bit."""
    threshold = tl.full((), 0, u.dtype)
    for i in tl.static_range(WIDTH):
        candidate = threshold | tl.full((), 1 << (WIDTH - 1 - i), u.dtype)
        threshold = tl.where(tl.sum((u >= candidate).to(tl.int32)) >= top, candidate, threshold)
    return threshold


@jit
def _chosen(u, top, WIDTH: tl.constexpr):
    """Exactly the top largest: all above the threshold, and the first of those on it. Never -inf."""
    threshold = _threshold(u, top, WIDTH)
    above, on = u > threshold, u == threshold
    left = top - tl.sum(above.to(tl.int32))
    chosen = above | (on & (tl.cumsum(on.to(tl.int32), 0) <= left))
    if WIDTH == 16:
        chosen = chosen & (u > 0x3FF)
    else:
        chosen = chosen & (u > 0x7FFFFF)
    return chosen


@jit
def candidates_kernel(SCORES, VALUE, AT, m, top, segments, SEGMENT: tl.constexpr, WIDTH: tl.constexpr):
    """The best keys of one segment of a row, in the order of their positions."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = segment * SEGMENT + tl.arange(0, SEGMENT)
    s = tl.load(SCORES + row * m + key, mask=key < m, other=float("-inf"))
    if WIDTH == 16:  # the order of the floats, as integers
        bits = s.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        u = tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)
    else:
        bits = s.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        u = tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)
    chosen = _chosen(u, top, WIDTH)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    base = (row * segments + segment) * top
    tl.store(VALUE + base + place, u, mask=chosen)
    tl.store(AT + base + place, key, mask=chosen)


@jit
def select_kernel(VALUE, AT, NEAR, BITS, words, top, total, BT: tl.constexpr, WIDTH: tl.constexpr):
    """The best of all segments' candidates: near keys in the order of their positions, and a bit for each of them."""
    row = tl.program_id(0).to(tl.int64)
    which = tl.arange(0, BT)
    u = tl.load(VALUE + row * total + which, mask=which < total, other=0)
    at = tl.load(AT + row * total + which, mask=which < total, other=0)
    chosen = _chosen(u, top, WIDTH)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(NEAR + row * top + place, at.to(tl.int64), mask=chosen)
    tl.atomic_or(BITS + row * words + at // 32, 1 << (at % 32), mask=chosen)


def select(c: Tensor, k: Tensor, keep: Tensor | None, how: Reach, top: int) -> tuple[Tensor, Tensor]:
    """near_at (lead rows top), -1 where fewer keys are visible, and the bit mask (lead rows words)."""
    (b, h, clusters, d), (hk, m) = c.shape, k.shape[1:3]
    lead, words, segments = b * h, _triton.cdiv(m, 32), _triton.cdiv(m, min(SEGMENT, power(m)))
    half = k.dtype != torch.float32  # fp16 tells scores apart as finely as half-precision products can
    scores = torch.empty(lead, clusters, m, dtype=torch.float16 if half else torch.float32, device=c.device)
    width = 16 if half else 32
    tile = {"BC": min(64, power(clusters)), "BM": 128, "BD": power(d)}
    scores_kernel[(_triton.cdiv(m, tile["BM"]), _triton.cdiv(clusters, tile["BC"]), lead)](
        c, k, keep if keep is not None else c, scores,
        clusters, m, d, h, h // hk, how.scale, how.per, how.first, how.step, *k.stride()[:3],
        HAS_KEEP=keep is not None, PRECISION=precision(k), num_warps=4, **tile,
    )  # fmt: skip
    value = torch.zeros(lead * clusters, segments, top, dtype=torch.int32 if half else torch.int64, device=c.device)
    at = torch.empty(lead * clusters, segments, top, dtype=torch.int32, device=c.device)
    candidates_kernel[(lead * clusters, segments)](
        scores, value, at, m, top, segments, SEGMENT=min(SEGMENT, power(m)), WIDTH=width, num_warps=1
    )
    near = torch.full((lead, clusters, top), -1, dtype=torch.int64, device=c.device)
    bits = torch.zeros(lead, clusters, words, dtype=torch.int32, device=c.device)
    select_kernel[(lead * clusters,)](
        value, at, near, bits, words, top, segments * top, BT=power(segments * top), WIDTH=width, num_warps=4
    )
    return near, bits
