"""Writing a call down: its launches, torch's operators between them, and the memory that they pass on to each other.

What does not follow from shapes is refused: an operator whose result is read on the host, random numbers of torch's
own, a tensor that came from nowhere. Seeds are the exception: they are played anew, see ``Halves``. What is written
down is played by _tape.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ._launch import Buffer, plan_of, recording
from ._places import DRAWN, INPUT, MADE, MEMORY, Where

if TYPE_CHECKING:
    from typing_extensions import Self

EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty_strided")
_REFUSED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)


class CannotRecord(Exception):
    """This call does not follow from its shapes alone."""


@dataclass
class Slot:
    """Something that tensors of the call lie in: an input, memory, what an operator made, or a draw."""

    kind: int
    number: int = -1  # of the input
    size: int = 0  # bytes of memory
    draw: Any = None
    whole: Any = None  # (dtype, shape, stride) of the tensor that an operator made
    first: int = -1  # the steps that use it
    last: int = -1


@dataclass
class Launch:
    """A kernel. plan: how to call it by address; without one (an interpreter) it takes tensors."""

    kernel: Any
    plan: tuple[Any, ...] | None
    grid: tuple[int, ...]
    tensors: list[Where]
    numbers: tuple[Any, ...]
    loose: tuple[Any, ...]
    flags: dict[str, Any]
    lane: int  # 0: the caller's stream, 1: its companion


@dataclass
class Lanes:
    """Where a chain may begin to run beside, or is waited for."""

    part: bool


@dataclass
class Operator:
    """One of torch's, between kernels."""

    function: Any
    args: tuple[Any, ...]
    named: dict[str, Any]
    made: list[tuple[int, int]] = field(default_factory=list)  # (which result, slot)


class Watch(TorchDispatchMode):
    """Within this context a thread's launches come here first, and torch's operators."""

    def __enter__(self) -> Self:
        recording.tape = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        recording.tape = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]


class Recorder(Watch):
    """Within this context the calls of one thread are written down."""

    launches = True

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots: list[Slot] = []
        self.steps: list[Launch | Operator | Lanes] = []
        self.inputs: list[Tensor] = []
        self.bound = False  # does it hold the seed it was recorded with?
        self.lane = 0
        # May lanes be played side by side? What is no kernel by address knows the caller's stream alone
        self.abreast = True
        self._storages: dict[int, int] = {}  # the address of a storage -> its slot, as things stand
        self._exact: dict[int, int] = {}
        self._alive: list[Any] = []  # storages of inputs and draws: nobody else may get their addresses
        for x in inputs:
            self.add_input(x)

    def add_input(self, x: Tensor) -> None:
        slot = self._add(Slot(INPUT, len(self.inputs)))
        self.inputs.append(x)
        address = x.data_ptr()
        if address in self._exact:
            raise CannotRecord("two inputs are one tensor")
        self._exact[address] = slot
        storage = x.untyped_storage().data_ptr()
        self._storages[storage] = -1 if storage in self._storages else slot  # -1: several inputs share it

    def _add(self, slot: Slot) -> int:
        self.slots.append(slot)
        return len(self.slots) - 1

    def where(self, x: Tensor | Buffer) -> Where:
        """Where a tensor lies, used by the step that comes next."""
        if isinstance(x, Buffer):
            base = self.where(x.base)
            return Where(base.slot, x.offset, x.dtype, x.shape, ())
        shape, stride, slot = tuple(x.shape), tuple(x.stride()), None
        if x.numel() == 0:
            return Where(None, 0, x.dtype, shape, stride)
        address = x.data_ptr()
        slot = self._exact.get(address)
        if slot is None:
            slot = self._storages.get(x.untyped_storage().data_ptr())
            if slot is None or slot < 0:
                raise CannotRecord("a tensor from elsewhere")
        kind = self.slots[slot]
        kind.first, kind.last = len(self.steps) if kind.first < 0 else kind.first, len(self.steps)
        start = self.inputs[kind.number].data_ptr() if kind.kind == INPUT else x.untyped_storage().data_ptr()
        return Where(slot, address - start, x.dtype, shape, stride)

    def drew(self, draw: Callable[[int], Tensor], seed: int) -> Tensor:
        """What draw(seed) gives: a play will ask for it again, with a seed of its own."""
        with self._looking_away():
            x = draw(seed)
        self._storages[x.untyped_storage().data_ptr()] = self._add(Slot(DRAWN, draw=draw))
        self._alive.append(x)
        return x

    @contextmanager
    def _looking_away(self) -> Iterator[None]:
        """What happens here is not written down."""
        with _disable_current_modes():
            recording.tape = None
            try:
                yield
            finally:
                recording.tape = self

    def launched(
        self, kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | Buffer], numbers: tuple[Any, ...],
        loose: Any, flags: dict[str, Any], run: Callable[[], Any],
    ) -> None:  # fmt: skip
        """``run`` launches it in the ordinary way."""
        places = [self.where(x) for x in tensors]
        with self._looking_away():
            run()
        plan = plan_of(kernel, tensors, numbers, flags)
        self.abreast = self.abreast and (plan is not None or self.lane == 0)
        self.steps.append(Launch(kernel, plan, (*grid, 1, 1)[:3], places, numbers, loose, flags, self.lane))

    def part(self) -> None:
        """From here on there are two lanes."""
        self.steps.append(Lanes(part=True))

    def meet(self) -> None:
        """What ran beside is waited for."""
        self.steps.append(Lanes(part=False))
        self.lane = 0

    def spread_out(self) -> None:
        """What is used while there are two lanes is in use all the while: nobody knows which of them is ahead."""
        parted = 0
        for i, step in enumerate(self.steps):
            if not isinstance(step, Lanes):
                continue
            if step.part:
                parted = i
                continue
            for slot in self.slots:
                slot.first = parted if parted < slot.first < i else slot.first
                slot.last = i if parted < slot.last < i else slot.last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if any(tag in func.tags for tag in _REFUSED) and not _by_position(func, args):
            raise CannotRecord(f"{func} does not follow from shapes")
        if func._schema.name in EMPTY:
            found = func(*args, **named)
            if found.numel():
                size = found.untyped_storage().nbytes()
                self._storages[found.untyped_storage().data_ptr()] = self._add(Slot(MEMORY, size=size))
            return found
        if func.is_view:
            return func(*args, **named)
        self.abreast = self.abreast and self.lane == 0
        step = Operator(func, mapped(args, self.where), mapped(named, self.where))
        found = func(*args, **named)
        given = {x.untyped_storage().data_ptr() for x in _tensors((args, tuple(named.values())))}
        for which, x in enumerate(found if isinstance(found, (tuple, list)) else (found,)):
            if isinstance(x, Tensor) and x.numel() and x.untyped_storage().data_ptr() not in given:
                whole = x.dtype, tuple(x.shape), tuple(x.stride())
                slot = self._add(Slot(MADE, whole=whole, first=len(self.steps), last=len(self.steps)))
                self._storages[x.untyped_storage().data_ptr()] = slot
                step.made.append((which, slot))
        self.steps.append(step)
        return found


def mapped(x: Any, function: Callable[[Any], Any]) -> Any:
    """Tensors, or where they lie, in arguments."""
    if isinstance(x, (Tensor, Where)):
        return function(x)
    if isinstance(x, dict):
        return {name: mapped(each, function) for name, each in x.items()}
    return type(x)(mapped(each, function) for each in x) if type(x) in (tuple, list) else x


def _by_position(func: Any, args: Any) -> bool:
    """Indexing, as long as no mask says how many come out."""
    return func is torch.ops.aten.index.Tensor and all(x is None or x.dtype == torch.int64 for x in args[1])


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [found for each in x for found in _tensors(each)] if isinstance(x, (tuple, list)) else []
