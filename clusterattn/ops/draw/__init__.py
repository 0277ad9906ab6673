"""All randomness: a counter-based function of (seed, stream, counter).

No generator is consumed and nothing is stored, so the same numbers come out on every device, in a checkpointed second
forward, in a batch of one, and whatever the padding (the counter is a token's rank among the valid ones).

A seed is a whole number, or a tensor that holds one: it is read when the draw happens, so that a CUDA graph, which has
numbers for good, draws anew in every replay. Ops take it as two arguments, a number and perhaps the tensor that holds
the number instead.
"""

from __future__ import annotations

import functools
import math
from typing import Optional

import torch
from torch import Tensor

from .._jit import HAVE_TRITON
from .._launch import current_stream, recording
from .._op import Op, op

Seed = int | Tensor  # a tensor has no dimension and is int64, on the device of the call

# Constants below 2**31 keep every product of two 32-bit numbers inside int64: no overflow, on any backend.
_MULTIPLIERS = (0x7FEB352D, 0x5BD1E995, 0x31848BAB)
_LOW = 0xFFFFFFFF
STREAM_PLANES, STREAM_STARTS, STREAM_ROUNDS, STREAM_SAMPLE, STREAM_KEYS, STREAM_DIRECTIONS = 1, 2, 3, 4, 5, 6
STREAM_PART_STARTS, STREAM_PART_SAMPLE, STREAM_RESIDUALS = 15, 16, 17
MOST_KEPT = 1 << 14  # normal numbers in a draw that is kept


def _mix(x: Tensor) -> Tensor:
    """Scramble 32-bit integers held in int64 (multiply and xor-shift, three rounds)."""
    for multiplier in _MULTIPLIERS:
        x = ((x ^ (x >> 16)) * multiplier) & _LOW
    return x ^ (x >> 15)


def _in_one_launch(x: Tensor) -> bool:
    launches = x.is_cuda and HAVE_TRITON
    if not launches and recording.tape is not None:
        recording.tape.bound = True  # torch's operators hold the seed as one of their numbers
    return launches


def number_and_holder(seed: Seed) -> tuple[int, Tensor | None]:
    return (0, seed) if isinstance(seed, Tensor) else (seed, None)


def _bits(counter: Tensor, number: int, stream: int, holder: Tensor | None) -> Tensor:
    if _in_one_launch(counter):
        from . import kernels  # Triton's, where there is a GPU

        return kernels.bits(counter, number, stream, holder)
    counter, seed = counter.to(torch.int64), number if holder is None else holder
    x = _mix((counter + (seed & _LOW)) & _LOW)
    x = _mix(x ^ (((counter >> 32) ^ (seed >> 32)) & _LOW))
    return _mix((x + 0x3C6EF372 * stream) & _LOW)


def bits(counter: Tensor, seed: Seed, stream: int) -> Tensor:
    """A 32-bit random integer (as int64) for each counter.

    For eager code: a compiler that inlines the mixing, where every line reads the last one twice, never ends. Draws of
    calls are ops.
    """
    number, holder = number_and_holder(seed)
    drawn: Tensor = _bits(counter, number, stream, holder)
    return drawn


@op("normal")
def _normal(like: Tensor, rounds: int, each: int, number: int, stream: int, holder: Optional[Tensor] = None) -> Tensor:
    if _in_one_launch(like):
        from . import kernels  # Triton's, where there is a GPU

        return kernels.normal(rounds, each, number, stream, like.device, holder)
    first = torch.arange(rounds, device=like.device).unsqueeze(1) << 31
    counter = first + torch.arange(each, device=like.device)
    one = (_bits(counter, number, 2 * stream, holder).double() + 1) / 4294967297
    two = _bits(counter, number, 2 * stream + 1, holder).double() / 4294967296
    return (torch.sqrt(-2 * torch.log(one)) * torch.cos(2 * math.pi * two)).float()


@_normal.fake
def _(like: Tensor, rounds: int, each: int, number: int, stream: int, holder: Optional[Tensor] = None) -> Tensor:
    return like.new_empty((rounds, each), dtype=torch.float32)


def normals(rounds: int, each: int, seed: Seed, stream: int, like: Tensor) -> Tensor:
    """(rounds each) standard normal numbers (Box-Muller, computed in fp64 so that devices agree, shared out in fp32).
    Those of one round do not depend on how many rounds there are, nor on how many numbers: padding only adds some."""
    if not _kept_where(like, seed) or rounds * each > MOST_KEPT:
        number, holder = number_and_holder(seed)
        return _normal(like, rounds, each, number, stream, holder)  # type: ignore[no-any-return]
    return _drawn(_normal, rounds, each, seed, stream, like.device)


def normal(shape: tuple[int, ...], seed: Seed, stream: int, device: torch.device) -> Tensor:
    """One round of ``normals``."""
    return normals(1, math.prod(shape), seed, stream, torch.empty(0, device=device)).view(shape)


@op("stratified_among")
def _stratified_among(
    valid: Tensor, number: int, stream: int, most: int, wanted: Optional[Tensor] = None,
    holder: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    if _in_one_launch(valid):
        from . import kernels  # Triton's, where there is a GPU

        return kernels.stratified_among(valid, number, stream, most, wanted, holder)
    seen = valid.cumsum(-1)
    total = seen[..., -1:] if valid.shape[-1] else seen.sum(-1, keepdim=True)
    lot = torch.arange(most, device=valid.device)
    wanted = torch.full_like(total, most) if wanted is None else wanted
    rank = ((lot << 32) + _bits(lot, number, stream, holder)).double() * (total.double() / (wanted * 2.0**32))
    rank = torch.where(total > wanted, rank.long().clamp(max=total - 1), lot.expand_as(rank))
    at = torch.searchsorted(seen, (rank + 1).expand(*valid.shape[:-1], most).contiguous())
    return torch.where((rank < total) & (lot < wanted), at, -1)


@_stratified_among.fake
def _(
    valid: Tensor, number: int, stream: int, most: int, wanted: Optional[Tensor] = None,
    holder: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    return valid.new_empty((*valid.shape[:-1], most), dtype=torch.int64)


def stratified_among(valid: Tensor, seed: Seed, stream: int, most: int, wanted: Tensor | None = None) -> Tensor:
    """``most`` distinct valid positions at random over the sequence, (... most); -1 once the valid ones are used up.

    Stratified: the valid tokens are cut into ``most`` equal stretches and one is drawn from each. Only ranks among the
    valid tokens are drawn, so padding changes nobody's luck; nothing is sorted and the cost does not grow with length.
    ``wanted`` (... 1): how many of the ``most`` lots are drawn, where that follows the number of valid tokens.
    """
    number, holder = number_and_holder(seed)
    drawn: Tensor = _stratified_among(valid, number, stream, most, wanted, holder)
    return drawn


@op("stratified")
def _stratified(like: Tensor, n: int, most: int, number: int, stream: int, holder: Optional[Tensor] = None) -> Tensor:
    if _in_one_launch(like):
        from . import kernels  # Triton's, where there is a GPU

        return kernels.stratified(n, number, stream, most, like.device, holder)
    lot = torch.arange(most, device=like.device)
    if n <= most:
        return torch.where(lot < n, lot, -1)
    rank: Tensor = ((lot << 32) + _bits(lot, number, stream, holder)).double() * (n / (most * 2.0**32))
    return rank.long().clamp(max=n - 1)


@_stratified.fake
def _(like: Tensor, n: int, most: int, number: int, stream: int, holder: Optional[Tensor] = None) -> Tensor:
    return like.new_empty((most,), dtype=torch.int64)


def stratified(like: Tensor, n: int, seed: Seed, stream: int, most: int) -> Tensor:
    """As stratified_among where all n tokens are valid: the same positions for every sequence, (most,)."""
    if not _kept_where(like, seed):
        number, holder = number_and_holder(seed)
        return _stratified(like, n, most, number, stream, holder)  # type: ignore[no-any-return]
    return _drawn(_stratified, n, most, seed, stream, like.device)


def _kept_where(like: Tensor, seed: Seed) -> bool:
    """Are draws kept? In eager calls. Graphs of a GPU read memory for good, and draw for themselves; a rehearsal
    (ops/_ahead.py) draws nothing."""
    if not isinstance(seed, int) or torch.compiler.is_compiling() or type(like) is not Tensor:
        return False
    if recording.tape is not None and not recording.tape.launches:
        return False
    if like.is_cuda:
        return not torch.cuda.is_current_stream_capturing()
    return like.device.type == "cpu" and recording.tape is None and not torch._C._len_torch_dispatch_stack()


def _drawn(made: Op, first: int, second: int, seed: Seed, stream: int, device: torch.device) -> Tensor:
    """What an op makes of two sizes, a seed and a stream. Whoever records a call notes that it is a draw, to be asked
    for again with another seed."""
    assert isinstance(seed, int)

    def draw(number: int) -> Tensor:
        return _kept(made, first, second, number, stream, device, current_stream(device))

    drawn: Tensor = draw(seed) if recording.tape is None else recording.tape.drew(draw, seed)
    return drawn


@functools.lru_cache(maxsize=256)
def _kept(made: Op, first: int, second: int, number: int, stream: int, device: torch.device, queue: int) -> Tensor:
    """The draw is a function of these numbers: a loop of calls with one seed need not launch it again. Kept for each
    queue of the device (a CUDA stream), where whoever reads it comes after whoever wrote it."""
    with torch.inference_mode(False):  # it will serve calls outside as well
        drawn: Tensor = made(torch.empty(0, device=device), first, second, number, stream, None)
    return drawn


def positions(valid: Tensor | None, like: Tensor, n: int, seed: Seed, stream: int, most: int) -> Tensor:
    """``most`` of n tokens for each of the sequences ``like`` (b h ... n d): (b h ... most), -1 where there are fewer.

    valid (b 1 ... n), or None when all tokens are real. The draw is shared by the heads.
    """
    drawn: Tensor = (
        stratified(like, n, seed, stream, most) if valid is None else stratified_among(valid, seed, stream, most)
    )
    return drawn.expand(*like.shape[:-2], most)
