"""All randomness: a counter-based function of (seed, stream, counter).

No generator is consumed and nothing is stored, so the same numbers come out on every device, in a checkpointed second
forward, in a batch of one, and whatever the padding (the counter is a token's rank among the valid ones).
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from . import _draw_kernels
from .ops._jit import HAVE_TRITON

# Constants below 2**31 keep every product of two 32-bit numbers inside int64: no overflow, on any backend.
_MULTIPLIERS = (0x7FEB352D, 0x5BD1E995, 0x31848BAB)
_LOW = 0xFFFFFFFF
STREAM_PLANES, STREAM_STARTS, STREAM_ROUNDS, STREAM_SAMPLE, STREAM_KEYS, STREAM_DIRECTIONS = 1, 2, 3, 4, 5, 6


def _mix(x: Tensor) -> Tensor:
    """Scramble 32-bit integers held in int64 (multiply and xor-shift, three rounds)."""
    for multiplier in _MULTIPLIERS:
        x = ((x ^ (x >> 16)) * multiplier) & _LOW
    return x ^ (x >> 15)


def _in_one_launch(x: Tensor) -> bool:
    return x.is_cuda and HAVE_TRITON


@torch.library.custom_op("clusterattn::bits", mutates_args=())
def bits(counter: Tensor, seed: int, stream: int) -> Tensor:
    """A 32-bit random integer (as int64) for each counter.

    An op of its own because a compiler that inlines the mixing, where every line reads the last one twice, never ends.
    """
    if _in_one_launch(counter):
        return _draw_kernels.bits(counter, seed, stream)
    counter = counter.to(torch.int64)
    x = _mix((counter + (seed & _LOW)) & _LOW)
    x = _mix(x ^ (((counter >> 32) ^ (seed >> 32)) & _LOW))
    return _mix((x + 0x3C6EF372 * stream) & _LOW)


@bits.register_fake
def _(counter: Tensor, seed: int, stream: int) -> Tensor:
    return torch.empty_like(counter, dtype=torch.int64, memory_format=torch.contiguous_format)


def normal(shape: tuple[int, ...], seed: int, stream: int, device: torch.device, first: Tensor | int = 0) -> Tensor:
    """Standard normal numbers (Box-Muller, computed in fp64 so that devices agree, handed out in fp32)."""
    counter = torch.arange(math.prod(shape), device=device).view(shape) + first
    one = (bits(counter, seed, 2 * stream).double() + 1) / 4294967297
    two = bits(counter, seed, 2 * stream + 1).double() / 4294967296
    return (torch.sqrt(-2 * torch.log(one)) * torch.cos(2 * math.pi * two)).float()


def directions(rounds: int, each: int, d: int, seed: int, like: Tensor) -> Tensor:
    """(r each d) random directions. Those of one round do not depend on how many there are: padding only adds some."""
    return torch.stack(
        [normal((each, d), seed, STREAM_ROUNDS, like.device, first=one << 31) for one in range(rounds)]
    ).to(like.dtype)


@torch.library.custom_op("clusterattn::lottery", mutates_args=())
def lottery(valid: Tensor, seed: int, stream: int, most: int, wanted: Optional[Tensor] = None) -> Tensor:
    """``most`` distinct valid positions at random over the sequence, (... most); -1 once the valid ones are used up.

    Stratified: the valid tokens are cut into ``most`` equal stretches and one is drawn from each. Only ranks among the
    valid tokens are drawn, so padding changes nobody's luck; nothing is sorted and the cost does not grow with length.
    ``wanted`` (... 1): how many of the ``most`` lots are drawn, where that follows the number of valid tokens.
    """
    if _in_one_launch(valid):
        return _draw_kernels.lottery(valid, seed, stream, most, wanted)
    seen = valid.cumsum(-1)
    total = seen[..., -1:] if valid.shape[-1] else seen.sum(-1, keepdim=True)
    lot = torch.arange(most, device=valid.device)
    wanted = torch.full_like(total, most) if wanted is None else wanted
    rank = ((lot << 32) + bits(lot, seed, stream)).double() * (total.double() / (wanted * 2.0**32))
    rank = torch.where(total > wanted, rank.long().clamp(max=total - 1), lot.expand_as(rank))
    at = torch.searchsorted(seen, (rank + 1).expand(*valid.shape[:-1], most).contiguous())
    return torch.where((rank < total) & (lot < wanted), at, -1)


@lottery.register_fake
def _(valid: Tensor, seed: int, stream: int, most: int, wanted: Optional[Tensor] = None) -> Tensor:
    return valid.new_empty((*valid.shape[:-1], most), dtype=torch.int64)


@torch.library.custom_op("clusterattn::strata", mutates_args=())
def strata(like: Tensor, n: int, seed: int, stream: int, most: int) -> Tensor:
    """The lottery where all n tokens are valid: the same positions for every sequence, (most,), on like's device."""
    if _in_one_launch(like):
        return _draw_kernels.strata(n, seed, stream, most, like.device)
    lot = torch.arange(most, device=like.device)
    if n <= most:
        return torch.where(lot < n, lot, -1)
    rank: Tensor = ((lot << 32) + bits(lot, seed, stream)).double() * (n / (most * 2.0**32))
    return rank.long().clamp(max=n - 1)


@strata.register_fake
def _(like: Tensor, n: int, seed: int, stream: int, most: int) -> Tensor:
    return like.new_empty((most,), dtype=torch.int64)


def some(valid: Tensor | None, like: Tensor, n: int, seed: int, stream: int, most: int) -> Tensor:
    """``most`` of n tokens for each of the sequences ``like`` (b h ... n d): (b h ... most), -1 where there are fewer.

    valid (b 1 ... n), or None when all tokens are real. The draw is shared by the heads.
    """
    drawn: Tensor = strata(like, n, seed, stream, most) if valid is None else lottery(valid, seed, stream, most)
    return drawn.expand(*like.shape[:-2], most)
