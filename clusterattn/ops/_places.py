"""Where tensors of a recorded call lie, and where they lie in a play of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

INPUT, MEMORY, MADE, DRAWN = range(4)  # what tensors lie in
SCRATCH, KEPT = -1, -2  # among the tensors of a play: its memory, and what forward keeps for backward


class Where(NamedTuple):
    """A tensor of the call: in which slot, and how it lies there. offset: in bytes; slot None: it is empty."""

    slot: int | None
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Place(NamedTuple):
    """How a tensor of a play lies: in an input, or in something made (SCRATCH and KEPT: the memory of the play)."""

    source: int | None
    slot: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements
    whole: bool


def tensor_of(x: Place, inputs: Sequence[Tensor | None], made: dict[int, Tensor]) -> Tensor:
    if x.whole:
        return made[x.slot]
    if x.source is None:
        return torch.empty(x.shape, dtype=x.dtype, device=made[SCRATCH].device)
    offset = x.offset
    if x.source == INPUT:
        base = inputs[x.slot]
        assert base is not None
        offset += int(base.storage_offset())
    else:
        base = made[x.slot]
    if base.dtype != x.dtype:
        base = base.view(x.dtype)
    return base.as_strided(x.shape, x.stride, offset)


def given(x: Any, inputs: Sequence[Tensor | None], made: dict[int, Tensor]) -> Any:
    if type(x) is Place:
        return tensor_of(x, inputs, made)
    return [given(each, inputs, made) for each in x] if type(x) is list else x


def result(
    where: Where, inputs: Sequence[Tensor | None], made: dict[int, Tensor], lies: Callable[[Where], Place]
) -> Tensor:
    """Itself where it fills its slot: whoever gets it may write to it."""
    found = made.get(where.slot)  # type: ignore[arg-type]
    if found is not None and not where.offset and found.dtype == where.dtype and found.shape == where.shape:
        return found
    return tensor_of(lies(where), inputs, made)


def strides_of(where: Where) -> tuple[int, ...]:
    if where.stride or not where.shape:
        return where.stride
    strides, step = [], 1  # a buffer of a workspace lies densely
    for size in reversed(where.shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
