"""A call written down once and played again: its kernels, without what chose them.

A call runs a few dozen kernels, and Python takes longer to choose them than the device to run them. Which ones run, and
with which numbers, follows from the shapes of the call; so a ``Recorder`` (see _recorder.py) watches one call. A
``Tape`` plays what it noted for other tensors of the same shapes and strides: memory for all of it is one allocation,
laid out beforehand, and kernels are called by address. Nothing is kept between two plays but numbers and the latest
draws; the stream is the caller's. Plays that come again with the same addresses become CUDA graphs (see _graphs.py), in
which chains of kernels run side by side (see _aside.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._aside import Pair
from ._chunks import no_autocast
from ._graphs import graphs
from ._launch import Halves, current_stream, ordinary
from ._places import DRAWN, INPUT, KEPT, MADE, MEMORY, SCRATCH, Place, Where, given, result, strides_of
from ._recorder import CannotRecord, Lanes, Launch, Operator, Recorder, Slot, mapped

# ---------------------------------------------------------------------------------------------------- memory


def _laid_out(slots: list[tuple[int, Slot]]) -> tuple[dict[int, int], int]:
    """Offsets for slots in one block: those that do not live at the same time may share it. And its size."""
    placed: list[tuple[int, int, Slot]] = []
    offsets, total = {}, 0
    for name, slot in sorted(slots, key=lambda each: -each[1].size):
        size, at = -(-slot.size // 256) * 256, 0
        for low, high, other in sorted(placed, key=lambda each: each[0]):
            if other.first <= slot.last and slot.first <= other.last and at < high and low < at + size:
                at = high
        offsets[name] = at
        placed.append((at, at + size, slot))
        total = max(total, at + size)
    return offsets, total


_numbers = itertools.count()


class Kept(NamedTuple):
    """What the forward half of a tape leaves for the backward half."""

    memory: Tensor | None
    made: dict[int, Tensor]


class Half:
    """The forward or the backward steps of a tape, ready to be played.

    keeps: bytes that the backward half will read, hands_on: slots of tensors that it will.
    """

    def __init__(
        self, recorder: Recorder, begin: int, end: int, outputs: list[Where], kept: dict[int, int], keeps: int = 0,
        hands_on: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.slots, self.kept, self.outputs, self.keeps, self.hands_on = recorder.slots, kept, outputs, keeps, hands_on
        own = {where.slot for where in outputs}
        mine = [
            (i, slot) for i, slot in enumerate(self.slots)
            if slot.kind == MEMORY and begin <= slot.first < end and i not in kept and i not in own
        ]  # fmt: skip
        self.offsets, self.scratch = _laid_out(mine)
        made = [(where.slot, where) for where in outputs if where.slot is not None]
        self.results = [
            (slot, where.shape, strides_of(where), where.dtype) for slot, where in made
            if self.slots[slot].kind == MEMORY
        ]  # fmt: skip
        # Addresses: an input's, or an offset in scratch or kept memory, or a tensor's. The table of a play is made of
        # (which of these bases, offset).
        self.inputs = len(recorder.inputs)
        self.bases: list[int] = []  # the slots of tensors
        self.table: list[tuple[int, int]] = []
        self._places: dict[tuple[int, int], int] = {}
        last: dict[int, list[int]] = {}  # step -> what operators made that nobody asks for afterwards
        for i, one in enumerate(self.slots):
            if one.kind == MADE and begin <= one.first and one.last < end and i not in own:
                last.setdefault(one.last, []).append(i)
        self.abreast, self.by_address, self.seeded, self.number = recorder.abreast, True, False, next(_numbers)
        self.steps = [self._ready(step, last.get(i, [])) for i, step in enumerate(recorder.steps[begin:end], begin)]
        self.draws = [
            (i, slot.draw) for i, slot in enumerate(self.slots)
            if slot.kind == DRAWN and 0 <= slot.first < end and begin <= slot.last
        ]  # fmt: skip
        self._latest: tuple[int, int, dict[int, Tensor]] | None = None
        self.moving: dict[int, list[tuple[int, int]]] = {}  # slot made underway -> (place in the table, offset)
        for (slot, offset), place in self._places.items():
            if self.slots[slot].kind == MADE and self.slots[slot].first >= begin:
                self.moving.setdefault(slot, []).append((place, offset))

    def _place(self, where: Where) -> int:
        """Of an address in the table, whose last is that of empty tensors."""
        if where.slot is None:
            return -1
        key = where.slot, where.offset
        if key not in self._places:
            slot = self.slots[where.slot]
            if slot.kind == INPUT:
                entry = slot.number, where.offset
            elif where.slot in self.offsets:
                entry = self.inputs, self.offsets[where.slot] + where.offset
            elif where.slot in self.kept:
                entry = self.inputs + 1, self.kept[where.slot] + where.offset
            else:
                if where.slot not in self.bases:
                    self.bases.append(where.slot)
                entry = self.inputs + 2 + self.bases.index(where.slot), where.offset
            self._places[key] = len(self.table)
            self.table.append(entry)
        return self._places[key]

    def _ready(self, step: Launch | Operator | Lanes, frees: list[int]) -> tuple[Any, ...]:
        """What ``play`` reads of a step. One that takes tensors begins with None, and with what ``_do`` reads."""
        if isinstance(step, Lanes):
            return None, (step, (), {}, (), frees), 0, None, None, None, None
        self.by_address = self.by_address and isinstance(step, Launch) and step.plan is not None
        if isinstance(step, Operator):
            args, named = mapped(step.args, self._placed), mapped(step.named, self._placed)
            return None, (step.function._op, args, named, step.made, frees), 0, None, None, None, None
        lane = step.lane if self.abreast else 0
        if step.plan is None:
            args = [self._placed(where) for where in step.tensors]
            return None, (step, args, {}, (), frees), lane, None, None, None, None
        run, function, head, constants = step.plan
        at = [self._place(where) for where in step.tensors]
        pick: Any = itemgetter(*at) if len(at) > 1 else lambda table, only=at[0]: (table[only],)
        if isinstance(step.loose, Halves):
            self.seeded = True
            return run, step.grid, lane, (function, *head), pick, step.numbers, constants
        return run, step.grid, lane, (function, *head), pick, (*step.numbers, *step.loose, *constants), None

    def _placed(self, where: Where) -> Place:
        """Among which tensors of a play, and how."""
        if where.slot is None:
            return Place(None, 0, where.dtype, where.shape, where.stride, 0, False)
        slot, size = self.slots[where.slot], where.dtype.itemsize
        source, start = where.slot, 0
        if slot.kind == INPUT:
            return Place(INPUT, slot.number, where.dtype, where.shape, strides_of(where), where.offset // size, False)
        if where.slot in self.offsets:
            source, start = SCRATCH, self.offsets[where.slot]
        elif where.slot in self.kept:
            source, start = KEPT, self.kept[where.slot]
        elif slot.kind == MADE and not where.offset and slot.whole == (where.dtype, where.shape, where.stride):
            return Place(MADE, source, where.dtype, where.shape, where.stride, 0, True)
        return Place(MADE, source, where.dtype, where.shape, strides_of(where), (start + where.offset) // size, False)

    def play(self, inputs: Sequence[Tensor | None], seed: int, kept: Kept | None) -> tuple[list[Tensor], Kept]:
        """The outputs, and what is kept. ``kept``: of the forward half, None where this is it."""
        assert inputs[0] is not None  # q, which is always there
        # Operators were written down as autocast left them: it must not look at them again.
        casting = torch._C._is_any_autocast_enabled()
        with no_autocast(inputs[0]) if casting else nullcontext(), torch._C._AutoDispatchBelowADInplaceOrView():
            return self._play(inputs, seed, kept)

    def _play(self, inputs: Sequence[Tensor | None], seed: int, kept: Kept | None) -> tuple[list[Tensor], Kept]:
        device = inputs[0].device  # type: ignore[union-attr]  # q, which is always there
        scratch = torch.empty(self.scratch, dtype=torch.uint8, device=device)
        memory, made = (None, {}) if kept is None else (kept.memory, dict(kept.made))
        if kept is None and self.keeps:
            memory = torch.empty(self.keeps, dtype=torch.uint8, device=device)
        for slot, shape, stride, dtype in self.results:
            made[slot] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if self.draws:
            made.update(self._drawn(seed, current_stream(device)))
        bases = [0 if x is None else x.data_ptr() for x in inputs]
        bases += [0] * (self.inputs - len(bases))  # gradients come later
        bases += (scratch.data_ptr(), 0 if memory is None else memory.data_ptr())
        bases += [made[slot].data_ptr() if slot in made else 0 for slot in self.bases]
        made[SCRATCH] = scratch
        if memory is not None:
            made[KEPT] = memory
        run, stream = partial(self._run, bases, seed, inputs, made), current_stream(device)
        if self.by_address and graphs.on and device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            graphs.play((self.number, seed if self.seeded else 0, *bases), device, run, stream)
        else:
            run(stream, None)
        found = [result(where, inputs, made, self._placed) for where in self.outputs]
        # An output that backward reads is kept as another tensor: it will itself hold the graph that holds this.
        return found, Kept(memory, {i: made[i].detach() for i in self.hands_on})

    def _drawn(self, seed: int, stream: int) -> dict[int, Tensor]:
        """By slot; the latest are at hand."""
        latest = self._latest
        if latest is None or latest[:2] != (seed, stream):
            self._latest = latest = seed, stream, {slot: draw(seed) for slot, draw in self.draws}
        return latest[2]

    def _run(
        self, bases: Sequence[int], seed: int, inputs: Sequence[Tensor | None], made: dict[int, Tensor], stream: int,
        pair: Pair | None,
    ) -> None:  # fmt: skip
        """All steps, on a stream; its companion runs what may run beside."""
        table = [bases[base] + offset for base, offset in self.table]
        table.append(0)
        streams, halves = (stream, stream if pair is None else pair.side.cuda_stream), Halves.of(seed)
        for run, grid, lane, ahead, pick, numbers, constants in self.steps:
            if run is None:
                self._do(grid, inputs, made, halves, table, pair)
            elif constants is None:
                run(*grid, streams[lane], *ahead, *pick(table), *numbers)
            else:
                run(*grid, streams[lane], *ahead, *pick(table), *numbers, *halves, *constants)

    def _do(
        self, step: tuple[Any, ...], inputs: Sequence[Tensor | None], made: dict[int, Tensor], halves: Halves,
        table: list[int], pair: Pair | None,
    ) -> None:  # fmt: skip
        """A step that is no kernel by address."""
        function, args, named, results, frees = step
        passed = [given(x, inputs, made) for x in args]
        if type(function) is Lanes:
            if pair is not None:
                (pair.part if function.part else pair.meet)()
        elif type(function) is Launch:
            loose = halves if isinstance(function.loose, Halves) else function.loose
            ordinary(function.kernel, function.grid, passed, function.numbers, loose, function.flags)
        else:
            found = function(*passed, **{name: given(x, inputs, made) for name, x in named.items()})
            for which, slot in results:
                made[slot] = mine = found[which] if type(found) in (tuple, list) else found
                for place, offset in self.moving.get(slot, ()):
                    table[place] = mine.data_ptr() + offset
        for slot in frees:
            made.pop(slot, None)


class Tape:
    """A recorded call. middle: where its backward steps begin, None for a call without."""

    def __init__(
        self, recorder: Recorder, outputs: Sequence[Where], middle: int | None = None,
        gradients: Sequence[Where] = (),
    ) -> None:  # fmt: skip
        if recorder.abreast:
            recorder.spread_out()
        steps, slots = len(recorder.steps), recorder.slots
        split = steps if middle is None else middle
        for where in (*outputs, *gradients):
            if where.slot is not None and slots[where.slot].kind in (INPUT, DRAWN):
                raise CannotRecord("an output that is an input")
        own = {where.slot for where in outputs if where.slot is not None}
        across = [(i, slot) for i, slot in enumerate(slots) if 0 <= slot.first < split <= slot.last < steps]
        kept, keeps = _laid_out([(i, slot) for i, slot in across if slot.kind == MEMORY and i not in own])
        if middle is None:
            kept, keeps, across = {}, 0, []
        on = tuple(i for i, slot in across if slot.kind == MADE or i in own)
        self.bound = recorder.bound
        self.forward = Half(recorder, 0, split, list(outputs), kept, keeps, on)
        self.backward = None if middle is None else Half(recorder, split, steps, list(gradients), kept)
