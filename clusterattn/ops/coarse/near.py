"""Each centroid's near keys, without a sort and without its scores in memory.

A pass over the keys writes the largest score of every few neighbouring keys, a group, and of every span of groups. The
``top`` best keys of a row can only lie in its ``top`` best groups, and these only in its ``top`` best spans: three
searches for a threshold among a few hundred numbers each, and the few keys that are left are scored anew. The chosen
keys become a list and a bit mask, (lead words rows): a word has 32 keys, and a tile of rows reads its words together.

Keys are chosen as they came, so that parts may be made meanwhile; a second mask is of the keys in the order of their
parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import in_turn, jit, power, precision, rows, tl
from .._launch import cdiv, launch
from .arrange import Arranged
from .reference import Reach

GROUP = 4  # keys
PROGRAMS = 1056  # of the pass over the keys: eight to each multiprocessor of a large chip


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
def outside(first, begin, end):
    """Of 32 keys from ``first`` on, those before ``begin`` or from ``end`` on, as the bits of a word."""
    low, high = tl.minimum(tl.maximum(begin - first, 0), 32), tl.minimum(tl.maximum(end - first, 0), 32)
    one = tl.full((), 1, tl.int64)
    return (~((one << high) - (one << low))).to(tl.int32)


@jit
def across(BITS, lead, row, rows, words, first, begin, end, place, HAS_NEAR: tl.constexpr):
    """Which of a tile's keys (across) are near for which rows (down), or stand outside of begin .. end."""
    low, high = outside(first, begin, end), outside(first + 32, begin, end)
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
def _rounded(best, scale):
    """A score before it becomes fp16: what is seen stays above -inf."""
    return tl.maximum(best * scale, -60000.0)


@jit
def maxima_kernel(
    C, K, KEEP, BEST, SPANS, BITS, PLACED, rows, m, d, heads, group, scale, per, first, step, columns, tiles, words,
    skb, skh, skm, seb, seh, HAS_KEEP: tl.constexpr, HAS_PARTS: tl.constexpr, PREFIX: tl.constexpr,
    FLIP: tl.constexpr, GROUP: tl.constexpr,
    SPAN: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The best score of each group and span of a few tiles of keys; tiles that no row here may see are left out. FLIP:
    the scale is negative, so that the lowest product is the best."""
    in_turn()
    lead = tl.program_id(2).to(tl.int64)
    batch, head = lead // heads, (lead % heads) // group
    row, dims = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BD)
    begin = tl.program_id(0) * tiles
    end = tl.minimum(begin + tiles, tl.cdiv(m, BM))
    for tile in range(begin, end):  # nobody is near yet
        word = tile * (BM // 32) + tl.arange(0, BM // 32)
        word_at, nobody = (lead * words + word[:, None]) * rows + row[None, :], tl.zeros((BM // 32, BC), tl.int32)
        mask = (word < words)[:, None] & (row < rows)[None, :]
        tl.store(BITS + word_at, nobody, mask=mask)
        if HAS_PARTS:
            tl.store(PLACED + word_at, nobody, mask=mask)
    c = tl.load(
        C + (lead * rows + row[:, None]) * d + dims[None, :],
        mask=(row[:, None] < rows) & (dims[None, :] < d),
        other=0.0,
    )
    limit = row
    if PREFIX:
        limit = _limit(row, m, per, first, step)
        end = tl.minimum(end, tl.cdiv(tl.max(tl.where(row < rows, limit, 0)), BM))
    # Columns of the product are keys in such an order that a thread, which holds two of every eight columns, has
    # neighbours
    column = tl.arange(0, BM)
    place = column % 8 // 2 * (BM // 4) + column // 8 * 2 + column % 2
    best_at = BEST + (lead * rows + row[:, None]) * columns * (BM // GROUP) + tl.arange(0, BM // GROUP)[None, :]
    span_at = SPANS + (lead * rows + row[:, None]) * columns * (BM // SPAN) + tl.arange(0, BM // SPAN)[None, :]
    for tile in range(begin, end):
        key = tl.minimum(tile * BM + place, m - 1)  # behind the last key it is seen again, so no group is empty
        k = tl.load(
            K + batch * skb + head * skh + key.to(tl.int64)[:, None] * skm + dims[None, :],
            mask=(dims < d)[None, :], other=0.0,
        )  # fmt: skip
        s = tl.dot(c, tl.trans(k), input_precision=PRECISION)
        if FLIP:
            s = -s
        if HAS_KEEP:
            s = tl.where((tl.load(KEEP + batch * seb + head * seh + key) != 0)[None, :], s, float("-inf"))
        if PREFIX:
            s = tl.where(key[None, :] < limit[:, None], s, float("-inf"))
        s = tl.permute(tl.reshape(s, (BC, BM // 8, 4, 2)), (0, 2, 1, 3))
        best = tl.max(tl.reshape(s, (BC, BM // GROUP, GROUP)), 2)
        value = _rounded(best, tl.abs(scale))
        if HAS_KEEP or PREFIX:
            value = tl.where(best == float("-inf"), best, value)
        span = tl.max(tl.reshape(value, (BC, BM // SPAN, SPAN // GROUP)), 2)
        tl.store(best_at + tile * (BM // GROUP), value.to(BEST.dtype.element_ty), mask=(row < rows)[:, None])
        tl.store(span_at + tile * (BM // SPAN), span.to(SPANS.dtype.element_ty), mask=(row < rows)[:, None])


@jit
def _ordered(x):
    """Floats of 16 or 32 bits as whole numbers in the same order."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        u = bits ^ ((bits >> 15) & 0x7FFF)
    else:
        bits = x.to(tl.int32, bitcast=True)
        u = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return u


@jit
def _reaching(u, least, N: tl.constexpr, HALF: tl.constexpr):
    """How many of N numbers are no less. Those of 16 bits are counted by the signs of differences: half the work."""
    if HALF:
        count = N - tl.sum(((u - least).to(tl.uint32) >> 31).to(tl.int32), 0)
    else:
        count = tl.sum((u >= least).to(tl.int32), 0)
    return count


@jit
def _best(s, seen, top, guess, N: tl.constexpr):
    """Which of N scores are the ``top`` largest of those seen, of equal ones the first; and a threshold, as a whole
    number, that they reach. By halving, after a first try with the guess or with the least seen. As many reach the
    threshold of the level before, unless a score came out a last bit lower: so it is tried, not trusted."""
    HALF: tl.constexpr = s.dtype.primitive_bitwidth == 16
    never = _ordered(tl.full((), float("-inf"), s.dtype))
    u = tl.where(seen, _ordered(s), never)
    low, high, reached = never, tl.max(u, 0), 0
    middle = tl.maximum(guess, tl.min(tl.where(u > never, u, 0x7FFFFFFF), 0))
    while low < high:
        count = _reaching(u, middle, N, HALF)
        reached = tl.where(count >= top, count, reached)
        low = tl.where(count >= top, middle, low)
        high = tl.where(count > top, high, tl.where(count == top, middle, middle - 1))
        middle = (low | high) - ((low ^ high) >> 1)  # of the two upwards, in 32 bits
    chosen = u >= tl.maximum(low, never + 1)
    if reached > top:  # equal ones
        above, on = u > low, u == low
        chosen = above | (on & (tl.cumsum(on.to(tl.int32), 0) <= top - tl.sum(above.to(tl.int32), 0)))
    return chosen, low


@jit
def _counts(word):
    """How many bits are set in each two, four and eight of a word."""
    twos = word - ((word >> 1) & 0x55555555)
    fours = (twos & 0x33333333) + ((twos >> 2) & 0x33333333)
    return twos, fours, (fours + (fours >> 4)) & 0x0F0F0F0F


@jit
def _places(chosen, N: tl.constexpr, BT: tl.constexpr):
    """The places of the chosen among N, in order, then -1. They become bits of words: the bit of a rank is found by
    halving over the words, then inside its word."""
    word = tl.sum(tl.where(tl.reshape(chosen, (N // 32, 32)), (1 << tl.arange(0, 32))[None, :], 0), 1).to(tl.uint32)
    _, _, eights = _counts(word)
    until = tl.cumsum(((eights * 0x01010101) >> 24).to(tl.int32), 0)
    rank = tl.arange(0, BT)
    found = rank < tl.max(until, 0)
    at = tl.zeros((BT,), tl.int32)
    for i in tl.static_range(16):
        if (N // 64) >> i > 0:
            at += tl.where(tl.gather(until, at + ((N // 64 >> i) - 1), 0) <= rank, N // 64 >> i, 0)
    rank -= tl.where(at > 0, tl.gather(until, tl.maximum(at - 1, 0), 0), 0)
    word, bit = tl.gather(word, at, 0), tl.zeros((BT,), tl.uint32)
    twos, fours, eights = _counts(word)
    for i in tl.static_range(5):
        if i == 0:
            low = (eights + (eights >> 8)) & 0xFF
        elif i == 1:
            low = (eights >> bit) & 0xFF
        elif i == 2:
            low = (fours >> bit) & 0xF
        elif i == 3:
            low = (twos >> bit) & 3
        else:
            low = (word >> bit) & 1
        low = low.to(tl.int32)
        behind = rank >= low
        rank -= tl.where(behind, low, 0)
        bit += tl.where(behind, 16 >> i, 0).to(tl.uint32)
    return tl.where(found, at * 32 + bit.to(tl.int32), -1)


@jit
def _among(LIST, place, EACH: tl.constexpr):
    """What the places stand for, where each entry of a list stands for so many."""
    there = place >= 0
    entry = tl.load(LIST + place // EACH, mask=there, other=0).to(tl.int32)
    return tl.where(there, entry * EACH + place % EACH, -1)


@jit
def _write(LIST, what, top, BT: tl.constexpr):
    """In memory, so that every thread may read what it needs."""
    tl.debug_barrier()  # behind those who read what it was
    tl.store(LIST + tl.arange(0, BT), what.to(tl.int64), mask=tl.arange(0, BT) < top)
    tl.debug_barrier()  # before those who read it


@jit
def select_kernel(
    C, K, KEEP, BEST, SPANS, NEAR, BITS, rows, m, d, heads, group, scale, per, first, step, columns, words, top,
    skb, skh, skm, seb, seh, HAS_KEEP: tl.constexpr, LEVELS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    BM: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The near keys of one row, by the best of its spans (LEVELS 3), the best groups of these (LEVELS 2) and the best
    keys of these. Where there are no more than ``top`` spans, or groups, all are looked at. What a level has found
    stands where the near keys will."""
    in_turn()
    EACH: tl.constexpr = SPAN // GROUP
    lead, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    at = tl.program_id(0).to(tl.int64)
    limit = _limit(row, m, per, first, step)
    LIST = NEAR + at * top
    slot, guess = tl.arange(0, BT), -0x7FFFFFFF
    if LEVELS > 2:
        span = tl.arange(0, BS)
        s = tl.load(SPANS + at * columns * (BM // SPAN) + span, mask=span // 8 * 8 * SPAN < limit, other=0.0)
        chosen, guess = _best(s, span * SPAN < limit, top, guess, BS)
        _write(LIST, _places(chosen, BS, BT), top, BT)
    if LEVELS > 1:
        span = slot
        if LEVELS > 2:
            span = tl.load(LIST + slot, mask=slot < top, other=-1).to(tl.int32)
        which = span[:, None] * EACH + tl.arange(0, EACH)[None, :]
        there = ((span >= 0) & (span * SPAN < limit))[:, None]
        s = tl.reshape(tl.load(BEST + at * columns * (BM // GROUP) + which, mask=there, other=0.0), (BT * EACH,))
        seen = tl.reshape(there & (which * GROUP < limit), (BT * EACH,))
        chosen, guess = _best(s, seen, top, guess, BT * EACH)
        place = _places(chosen, BT * EACH, BT)
        if LEVELS > 2:
            place = _among(LIST, place, EACH)
        _write(LIST, place, top, BT)
    key = tl.arange(0, BT * GROUP)
    if LEVELS > 1:
        entry = tl.load(LIST + key // GROUP, mask=key // GROUP < top, other=-1).to(tl.int32)
        key = tl.where(entry < 0, m, entry * GROUP + key % GROUP)
    batch, head = (lead // heads).to(tl.int64), ((lead % heads) // group).to(tl.int64)
    seen = key < limit
    source = tl.where(seen, key, 0)
    if HAS_KEEP:
        seen = seen & (tl.load(KEEP + batch * seb + head * seh + source, mask=seen, other=0) != 0)
    s = tl.zeros((BT * GROUP,), tl.float32)
    k_from = K + batch * skb + head * skh + source.to(tl.int64)[:, None] * skm
    for start in range(0, d, AHEAD * BD):
        for i in tl.static_range(AHEAD):
            dims = start + i * BD + tl.arange(0, BD)
            c = tl.load(C + at * d + dims, mask=dims < d, other=0.0).to(tl.float32)
            k = tl.load(k_from + dims[None, :], mask=(dims < d)[None, :], other=0.0).to(tl.float32)
            s += tl.sum(k * c[None, :], 1)
    chosen, _ = _best(_rounded(s, scale).to(BEST.dtype.element_ty), seen, top, guess, BT * GROUP)
    key = _places(chosen, BT * GROUP, BT)
    if LEVELS > 1:
        key = _among(LIST, key, GROUP)
    _write(LIST, key, top, BT)
    _mark(BITS, lead.to(tl.int64), row, rows, words, key)


@jit
def _mark(BITS, lead, row, rows, words, place):
    """Keys at these places are near for a row; -1: none."""
    word = BITS + (lead * words + place // 32) * rows + row
    tl.atomic_or(word, 1 << (place % 32), mask=place >= 0, sem="relaxed")


@jit
def mark_kernel(NEAR, PLACE, BITS, rows, m, heads, group, words, top, BT: tl.constexpr):
    """The mask of keys that stand in the order of their parts."""
    in_turn()
    at, lead = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1).to(tl.int64)
    key_lead = lead // heads * (heads // group) + (lead % heads) // group
    key = tl.load(NEAR + lead * rows * top + at, mask=at < rows * top, other=-1)
    place = tl.load(PLACE + key_lead * m + key, mask=key >= 0, other=-1)
    _mark(BITS, lead, at // top, rows, words, place)


def _score_tiles(half: bool, clusters: int, wide: int) -> dict[str, int]:
    return {"BC": min(128 if half else 32, power(clusters)), "BM": 64, "BD": wide, "num_warps": 4}


def _search_tiles(size: int, d: int, top: int, spans: int, span: int) -> dict[str, int]:
    """size: bytes of a number. Up to 1024 numbers one warp finds its way without waiting for others. A thread takes 16
    bytes of a key at once, and asks for as many pieces ahead as half of its registers hold."""
    few, most = power(top, least=8), power(spans, least=32) if spans > top else 32
    warps = max(1, min(16, max(most, few * span // GROUP) // 1024))
    pieces = min(power(d) * size // 16, 8, 32 * 32 * warps // (few * GROUP))
    return {"BS": most, "BT": few, "BD": 16 // size, "AHEAD": max(1, pieces), "num_warps": warps}


def select(c: Tensor, keys: Arranged, reach: Reach, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """near_at (lead rows top), -1 where fewer keys are visible, and the bit mask (lead words rows), of the keys as they
    came; and one of the keys in the order of their parts, where ``marked`` will write. Without parts that is the same.
    """
    k = keys.k
    (b, h, clusters, d), (hk, m) = c.shape, k.shape[1:3]
    lead, words = b * h, cdiv(m, 32)
    half = k.dtype != torch.float32  # fp16 tells scores apart as finely as half-precision products can
    tile = _score_tiles(half, clusters, power(d))
    columns, row_tiles = cdiv(m, tile["BM"]), cdiv(clusters, tile["BC"])
    span = 64 if m * GROUP >= 2048 * top else 32  # about as many spans as groups in the best ones
    spans, groups = cdiv(m, span), cdiv(m, GROUP)
    padded = cdiv(columns, 16) * 16  # rows of maxima begin at whole vectors
    dtype = torch.float16 if half else torch.float32
    best = torch.empty(lead, clusters, padded * (tile["BM"] // GROUP), dtype=dtype, device=c.device)
    best_spans = torch.empty(lead, clusters, padded * (tile["BM"] // span), dtype=dtype, device=c.device)
    bits = torch.empty(lead, words, clusters, dtype=torch.int32, device=c.device)
    placed = bits if keys.order is None else torch.empty_like(bits)
    near = torch.empty(lead, clusters, top, dtype=torch.int64, device=c.device)
    tiles = max(1, columns * row_tiles * lead // PROGRAMS)  # the centroids are read once for so many
    view = clusters, m, d, h, h // hk, reach.scale, reach.per, reach.first, reach.step, padded
    strides = *k.stride()[:3], *keys.keep_strides
    launch(
        maxima_kernel, (cdiv(columns, tiles), row_tiles, lead), (c, k, keys.keep_or(c), best, best_spans, bits, placed),
        (*view, tiles, words, *strides),
        HAS_KEEP=keys.keep is not None, HAS_PARTS=keys.order is not None, PREFIX=reach.per > 0,
        FLIP=reach.scale < 0, GROUP=GROUP, SPAN=span, PRECISION=precision(k), num_stages=3, **tile,
    )  # fmt: skip
    launch(
        select_kernel, (lead * clusters,), (c, k, keys.keep_or(c), best, best_spans, near, bits),
        (*view, words, top, *strides),
        HAS_KEEP=keys.keep is not None, LEVELS=1 + (groups > top) + (spans > top),
        GROUP=GROUP, SPAN=span, BM=tile["BM"], **_search_tiles(k.element_size(), d, top, spans, span),
    )  # fmt: skip
    return near, bits, placed


def marked(near: Tensor, bits: Tensor, keys: Arranged, heads: int) -> None:
    """The near keys (lead rows top) of so many heads, in the mask of the keys in the order of their parts."""
    if keys.order is None:
        return
    (lead, rows, top), (hk, m) = near.shape, keys.k.shape[1:3]
    launch(
        mark_kernel, (cdiv(rows * top, 512), lead), (near, keys.place_or(near), bits),
        (rows, m, heads, heads // hk, bits.shape[1], top), BT=512, num_warps=4,
    )  # fmt: skip


def closest(c: Tensor, points: Tensor, valid: Tensor | None, top: int) -> Tensor:
    """Of the points (b h n d) those with the largest products with each of c (b h c d): (b h c top)."""
    points, c = rows(points), c.to(points.dtype).contiguous()
    reach = Reach(scale=1.0, top=top, tangent=False, per=0, first=0, step=0)
    near, *_ = select(c, Arranged(points, points, None if valid is None else valid.contiguous()), reach, top)
    return near.view(*c.shape[:3], top)
