"""The draws as one launch each: the arithmetic of draw.py, line by line."""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import in_turn, jit, tl
from .._launch import Halves, cdiv, launch


@jit
def _mix(x):
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x5BD1E995) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x31848BAB) & 0xFFFFFFFF
    return x ^ (x >> 15)


@jit
def halves(HOLDER, low, high, HELD: tl.constexpr):
    """The low and the high 32 bits of the seed: as given, or of the number that HOLDER holds now."""
    low, high = low.to(tl.int64) & 0xFFFFFFFF, high.to(tl.int64) & 0xFFFFFFFF
    if HELD:
        seed = tl.load(HOLDER)
        low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return low, high


@jit
def bits_kernel(COUNTER, OUT, HOLDER, total, stream, low, high, HELD: tl.constexpr, BLOCK: tl.constexpr):
    in_turn()
    low, high = halves(HOLDER, low, high, HELD)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counter = tl.load(COUNTER + at, mask=at < total, other=0).to(tl.int64)
    x = _mix((counter + low) & 0xFFFFFFFF)
    x = _mix(x ^ (((counter >> 32) ^ high) & 0xFFFFFFFF))
    salt = counter * 0 + stream  # int64, also where the launch has turned stream into a constant
    tl.store(OUT + at, _mix((x + 0x3C6EF372 * salt) & 0xFFFFFFFF), mask=at < total)


def seed_arguments(number: int, holder: Tensor | None, other: Tensor) -> tuple[Tensor, Halves]:
    """HOLDER (``other`` where there is none), and the seed."""
    return other if holder is None else holder, Halves.of(number)


def bits(counter: Tensor, number: int, stream: int, holder: Tensor | None) -> Tensor:
    counter = counter.contiguous()
    out = torch.empty_like(counter, dtype=torch.int64)
    total = counter.numel()
    held, halves = seed_arguments(number, holder, out)
    if total:
        launch(
            bits_kernel, (cdiv(total, 1024),), (counter, out, held), (total, stream), halves,
            HELD=holder is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out


@jit
def normal_kernel(OUT, HOLDER, total, each, stream, low, high, HELD: tl.constexpr, BLOCK: tl.constexpr):
    """Box-Muller in fp64 on the counters of each round."""
    in_turn()
    low, high = halves(HOLDER, low, high, HELD)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counter = at % each + ((at // each) << 31)
    x = _mix((counter + low) & 0xFFFFFFFF)
    x = _mix(x ^ (((counter >> 32) ^ high) & 0xFFFFFFFF))
    salt = counter * 0 + 2 * stream  # int64, also where the launch has turned stream into a constant
    one = _mix((x + 0x3C6EF372 * salt) & 0xFFFFFFFF)
    two = _mix((x + 0x3C6EF372 * (salt + 1)) & 0xFFFFFFFF)
    radius = tl.sqrt(-2.0 * tl.log((one.to(tl.float64) + 1.0) / 4294967297.0))
    drawn = radius * tl.cos(6.283185307179586 * (two.to(tl.float64) / 4294967296.0))
    tl.store(OUT + at, drawn.to(tl.float32), mask=at < total)


def normal(rounds: int, each: int, number: int, stream: int, device: torch.device, holder: Tensor | None) -> Tensor:
    out = torch.empty(rounds, each, dtype=torch.float32, device=device)
    held, halves = seed_arguments(number, holder, out)
    if out.numel():
        launch(
            normal_kernel, (cdiv(out.numel(), 256),), (out, held), (out.numel(), each, stream), halves,
            HELD=holder is not None, BLOCK=256, num_warps=4,
        )  # fmt: skip
    return out


@jit
def _rank(lot, total, wanted, low, high, stream):
    """The rank, among ``total`` tokens, that lot number ``lot`` of ``wanted`` draws from its own stretch of them."""
    x = _mix((lot + low) & 0xFFFFFFFF)
    x = _mix(x ^ (((lot >> 32) ^ high) & 0xFFFFFFFF))
    x = _mix((x + 0x3C6EF372 * (lot * 0 + stream)) & 0xFFFFFFFF)
    drawn = ((lot << 32) + x).to(tl.float64) * (total.to(tl.float64) / (wanted.to(tl.float64) * 4294967296.0))
    return tl.where(total > wanted, tl.minimum(drawn.to(tl.int64), total - 1), lot)


@jit
def stratified_kernel(OUT, HOLDER, n, most, stream, low, high, HELD: tl.constexpr, BLOCK: tl.constexpr):
    in_turn()
    low, high = halves(HOLDER, low, high, HELD)
    lot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rank = _rank(lot, lot * 0 + n, lot * 0 + most, low, high, stream)
    tl.store(OUT + lot, tl.where(rank < n, rank, -1), mask=lot < most)


def stratified(n: int, number: int, stream: int, most: int, device: torch.device, holder: Tensor | None) -> Tensor:
    out = torch.empty(most, dtype=torch.int64, device=device)
    held, halves = seed_arguments(number, holder, out)
    if most:
        launch(
            stratified_kernel, (cdiv(most, 128),), (out, held), (n, most, stream), halves,
            HELD=holder is not None, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out


@jit
def stratified_among_kernel(
    SEEN, WANTED, OUT, HOLDER, n, most, stream, low, high,
    HELD: tl.constexpr, HAS_WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SEEN (lead n): how many valid tokens stand at or before each position."""
    in_turn()
    low, high = halves(HOLDER, low, high, HELD)
    lead = tl.program_id(1).to(tl.int64)
    lot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(SEEN + lead * n + n - 1)
    wanted = total * 0 + most
    if HAS_WANTED:
        wanted = tl.load(WANTED + lead)
    rank = _rank(lot, total, wanted, low, high, stream)
    first, last = lot * 0, lot * 0 + n
    for _ in range(32):  # the first position at which rank + 1 tokens have been seen
        middle = (first + last) // 2
        seen = tl.load(SEEN + lead * n + tl.minimum(middle, n - 1))
        more = (seen < rank + 1) & (first < last)
        last = tl.where(more | (first >= last), last, middle)
        first = tl.where(more, middle + 1, first)
    tl.store(OUT + lead * most + lot, tl.where((rank < total) & (lot < wanted), first, -1), mask=lot < most)


def stratified_among(
    valid: Tensor, number: int, stream: int, most: int, wanted: Tensor | None, holder: Tensor | None
) -> Tensor:
    lead, n = valid.shape[:-1], valid.shape[-1]
    seen = valid.cumsum(-1).contiguous()
    out = torch.empty(*lead, most, dtype=torch.int64, device=valid.device)
    held, halves = seed_arguments(number, holder, out)
    if out.numel():
        launch(
            stratified_among_kernel, (cdiv(most, 128), out.numel() // most),
            (seen, wanted.expand(*lead, 1).contiguous() if wanted is not None else seen, out, held),
            (n, most, stream), halves, HELD=holder is not None, HAS_WANTED=wanted is not None, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out
