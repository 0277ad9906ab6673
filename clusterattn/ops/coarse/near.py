"""Each centroid's near keys, without a sort.

Scores go to memory once, with the largest of each group of neighbouring keys. The ``top`` best keys of a row can only
lie in its ``top`` best groups; and of these few scores a binary search over their bits finds the threshold. The chosen
keys become a list and a bit mask, (lead words rows): a word has 32 keys, and a tile of rows reads its words together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._jit import jit, power, precision, rows, tl
from .._launch import cdiv, launch
from .arrange import Arranged
from .reference import Reach


@jit
def _limit(row, m, per, first, step):
    """How many keys a row may see."""
    prefix = tl.minimum(tl.maximum(first + (row // tl.maximum(per, 1)) * step, 0), m)
    return tl.where(per == 0, m, prefix)


@jit
def _words(BITS, lead, row, rows, words, first):
    """The words of two times 32 keys from ``first`` on, which begins one."""
    place, here = BITS + (lead * words + first // 32) * rows + row, row < rows
    return tl.load(place, mask=here, other=0), tl.load(place + rows, mask=here & (first // 32 + 1 < words), other=0)


@jit
def near_across(BITS, lead, row, rows, words, first, place):
    """Which of a tile's keys (across) are near for which rows (down). place: of a key in its tile; the compiler knows
    its bit."""
    low, high = _words(BITS, lead, row, rows, words, first)
    word = tl.where((place < 32)[None, :], low[:, None], high[:, None])
    return (word & (1 << (place % 32))[None, :]) != 0


@jit
def _outside(first, begin, end):
    """Of 32 keys from ``first`` on, those before ``begin`` or from ``end`` on, as the bits of a word."""
    low, high = tl.minimum(tl.maximum(begin - first, 0), 32), tl.minimum(tl.maximum(end - first, 0), 32)
    one = tl.full((), 1, tl.int64)
    return (~((one << high) - (one << low))).to(tl.int32)


@jit
def across(BITS, lead, row, rows, words, first, begin, end, place, HAS_NEAR: tl.constexpr):
    """Which of a tile's keys (across) are near for which rows (down), or stand outside of begin .. end."""
    low, high = _outside(first, begin, end), _outside(first + 32, begin, end)
    if HAS_NEAR:
        near_low, near_high = _words(BITS, lead, row, rows, words, first)
        low, high = low | near_low, high | near_high
        word = tl.where((place < 32)[None, :], low[:, None], high[:, None])
    else:
        word = tl.where(place < 32, low, high)[None, :]
    return (word & (1 << (place % 32))[None, :]) != 0


@jit
def near_down(BITS, lead, row, rows, words, first, place):
    """The same with keys down and rows across."""
    low, high = _words(BITS, lead, row, rows, words, first)
    word = tl.where((place < 32)[:, None], low[None, :], high[None, :])
    return (word & (1 << (place % 32))[:, None]) != 0


@jit
def scores_kernel(
    C, K, KEEP, SCORES, BEST, BITS, rows, m, d, heads, group, scale, per, first, step, groups, tiles, words,
    skb, skh, skm, seb, seh, HAS_KEEP: tl.constexpr, PREFIX: tl.constexpr, GROUP: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lead = tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    row, dims = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BD)
    c = tl.load(
        C + (lead * rows + row[:, None]) * d + dims[None, :],
        mask=(row[:, None] < rows) & (dims[None, :] < d),
        other=0.0,
    )
    limit = _limit(row, m, per, first, step)
    for tile in range(tl.program_id(0) * tiles, (tl.program_id(0) + 1) * tiles):
        key = tile * BM + tl.arange(0, BM)
        for word in tl.static_range(BM // 32):  # nobody is near yet
            empty = (row < rows) & (tile * (BM // 32) + word < words)
            tl.store(BITS + (lead * words + tile * (BM // 32) + word) * rows + row, tl.zeros((BC,), tl.int32), empty)
        k = tl.load(
            K + batch * skb + head * skh + key.to(tl.int64)[:, None] * skm + dims[None, :],
            mask=(key[:, None] < m) & (dims[None, :] < d), other=0.0,
        )  # fmt: skip
        s = tl.dot(c, tl.trans(k), input_precision=PRECISION) * scale
        s = tl.minimum(tl.maximum(s, -60000.0), 60000.0)  # the range of fp16
        seen = key < m
        if HAS_KEEP:
            seen = seen & (tl.load(KEEP + batch * seb + head * seh + key, mask=key < m, other=0) != 0)
        s = tl.where(seen[None, :], s, float("-inf"))
        if PREFIX:
            s = tl.where(key[None, :] < limit[:, None], s, float("-inf"))
        tl.store(
            SCORES + (lead * rows + row[:, None]) * m + key[None, :],
            s.to(SCORES.dtype.element_ty),
            mask=(row[:, None] < rows) & (key[None, :] < m),
        )
        if GROUP:
            best = tl.max(tl.reshape(s, (BC, BM // GROUP, GROUP)), 2)
            mine = tile * (BM // GROUP) + tl.arange(0, BM // GROUP)
            tl.store(
                BEST + (lead * rows + row[:, None]) * groups + mine[None, :],
                best.to(BEST.dtype.element_ty),
                mask=(row[:, None] < rows) & (mine[None, :] < groups),
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
def _ordered(s, WIDTH: tl.constexpr):
    """Floats as whole numbers in the same order."""
    if WIDTH == 16:
        bits = s.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        u = tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)
    else:
        bits = s.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        u = tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)
    return u


@jit
def _list(LIST, chosen, what, top, BT: tl.constexpr):
    """Write the chosen ones in their order, then -1 up to ``top``."""
    tl.store(LIST + tl.cumsum(chosen.to(tl.int32), 0) - 1, what, mask=chosen)
    slot = tl.arange(0, BT)
    found = tl.sum(chosen.to(tl.int32), 0)
    tl.store(LIST + slot, tl.full((BT,), -1, LIST.dtype.element_ty), mask=(slot >= found) & (slot < top))


@jit
def groups_kernel(BEST, CHOSEN, groups, top, BG: tl.constexpr, BT: tl.constexpr, WIDTH: tl.constexpr):
    """The ``top`` best groups of one row, in the order of their positions."""
    row, group = tl.program_id(0).to(tl.int64), tl.arange(0, BG)
    u = _ordered(tl.load(BEST + row * groups + group, mask=group < groups, other=float("-inf")), WIDTH)
    _list(CHOSEN + row * top, _chosen(u, top, WIDTH), group, top, BT)


@jit
def select_kernel(
    SCORES, CHOSEN, NEAR, BITS, rows, m, words, top, GROUP: tl.constexpr, ALL: tl.constexpr,
    BK: tl.constexpr, BT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The best keys of the chosen groups (ALL: of the whole row), in the order of their positions."""
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, BK)
    key = slot
    if not ALL:
        place = slot // GROUP
        group = tl.load(CHOSEN + row * top + place, mask=place < top, other=-1)
        key = tl.where(group < 0, m, group * GROUP + slot % GROUP)
    u = _ordered(tl.load(SCORES + row * m + key, mask=key < m, other=float("-inf")), WIDTH)
    chosen = _chosen(u, top, WIDTH)
    _list(NEAR + row * top, chosen, key.to(tl.int64), top, BT)
    tl.atomic_or(BITS + (row // rows * words + key // 32) * rows + row % rows, 1 << (key % 32), mask=chosen)


def _score_tiles(half: bool, clusters: int, wide: int) -> dict[str, int]:
    return {"BC": min(128 if half else 32, power(clusters)), "BM": 64, "BD": wide, "num_warps": 4}


def select(c: Tensor, keys: Arranged, reach: Reach, top: int) -> tuple[Tensor, Tensor]:
    """near_at (lead rows top), -1 where fewer keys are visible, and the bit mask (lead words rows)."""
    k = keys.k
    (b, h, clusters, d), (hk, m) = c.shape, k.shape[1:3]
    lead, words = b * h, cdiv(m, 32)
    half = k.dtype != torch.float32  # fp16 tells scores apart as finely as half-precision products can
    dtype, width = (torch.float16, 16) if half else (torch.float32, 32)
    tile = _score_tiles(half, clusters, power(d))
    # As many groups to choose from as scores in the chosen ones; a short row is searched as a whole.
    group = 0 if m <= max(512, 16 * top) else min(tile["BM"], power(math.isqrt(m // top), least=8))
    groups = cdiv(m, group) if group else 0
    scores = torch.empty(lead, clusters, m, dtype=dtype, device=c.device)
    best = torch.empty(lead, clusters, groups, dtype=dtype, device=c.device)
    bits = torch.empty(lead, words, clusters, dtype=torch.int32, device=c.device)
    columns, row_tiles = cdiv(m, tile["BM"]), cdiv(clusters, tile["BC"])
    tiles = max(1, min(8, columns * row_tiles * lead // 1024))  # the centroids are read once for so many
    launch(
        scores_kernel, (cdiv(columns, tiles), row_tiles, lead), (c, k, keys.keep_or(c), scores, best, bits),
        (clusters, m, d, h, h // hk, reach.scale, reach.per, reach.first, reach.step, groups, tiles, words,
        *k.stride()[:3], *keys.keep_strides),
        HAS_KEEP=keys.keep is not None, PREFIX=reach.per > 0, GROUP=group, PRECISION=precision(k), num_stages=3, **tile,
    )  # fmt: skip
    chosen = torch.empty(lead, clusters, top if group else 0, dtype=torch.int32, device=c.device)
    few = power(top, least=1)
    if group:
        many = power(groups)
        launch(
            groups_kernel, (lead * clusters,), (best, chosen), (groups, top),
            BG=many, BT=few, WIDTH=width, num_warps=max(1, min(8, many // 1024)),
        )  # fmt: skip
    near = torch.empty(lead, clusters, top, dtype=torch.int64, device=c.device)
    many = few * group if group else power(m)
    launch(
        select_kernel, (lead * clusters,), (scores, chosen, near, bits), (clusters, m, words, top),
        GROUP=max(group, 1), ALL=group == 0, BK=many, BT=few, WIDTH=width,
        num_warps=max(1, min(8, many // 256)),
    )  # fmt: skip
    return near, bits


def closest(c: Tensor, points: Tensor, valid: Tensor | None, top: int) -> Tensor:
    """Of the points (b h n d) those with the largest products with each of c (b h c d): (b h c top)."""
    points, c = rows(points), c.to(points.dtype).contiguous()
    reach = Reach(scale=1.0, top=top, tangent=False, per=0, first=0, step=0)
    near, _ = select(c, Arranged(points, points, None if valid is None else valid.contiguous()), reach, top)
    return near.view(*c.shape[:3], top)
