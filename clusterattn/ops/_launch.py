"""Launching kernels cheaply: what Triton finds out about a call is found out once for each shape.

Triton's own launch binds the arguments, looks at every one of them and at its options, and only then knows which
compiled kernel to run: tens of microseconds, more than most kernels here take. ``launch`` keeps the compiled kernel by
(kernel, device, dtypes, numbers, flags) and calls it straight away. Whatever is out of the ordinary (an interpreter, a
profiler's hooks, pointers that are not aligned, internals of Triton that look different) takes Triton's own way.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._jit import HAVE_TRITON, INTERPRETING, triton

ALIGNED = 16  # bytes: what Triton looks for in a pointer
PLANS = 1 << 14  # how many are kept before all are forgotten
HOPPER = 90  # from this architecture on a kernel can wait for the one before

_plans: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}
# A profiler's hooks; a list in the Tritons we know, in others every launch takes the ordinary way
_hooks = getattr(triton.knobs.runtime.launch_enter_hook, "calls", [None]) if HAVE_TRITON else [None]


class _Recording(threading.local):
    """Who writes down what this thread launches (see _recorder.py), or compiles it (see _ahead.py)."""

    tape: Any = None  # a Recorder, or a Rehearsal


recording = _Recording()


class _Aside(threading.local):
    """What runs beside what this thread launches (see _aside.py)."""

    chain: Any = None


aside = _Aside()


def joined() -> None:
    """What ran beside is there. (A compiler sees one chain: nothing is put aside while it looks.)"""
    if torch.compiler.is_compiling():
        return
    chain, aside.chain = aside.chain, None
    if chain is not None:
        chain.join()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Halves(tuple[int, int]):
    """The low and the high half of a seed, signed and of 32 bits: one kernel serves all seeds. Among the loose numbers
    of a launch they stand alone, so that a recorded one can be played with another seed."""

    __slots__ = ()

    @classmethod
    def of(cls, seed: int) -> Halves:
        return cls(((half & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for half in (seed, seed >> 32))


def current_stream(device: torch.device) -> int:
    """Of a GPU, as launches take it."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


class Buffer:
    """A buffer in a workspace. On a GPU it is an address; it becomes a tensor only where somebody needs one."""

    __slots__ = ("address", "base", "dtype", "offset", "shape")

    def __init__(self, base: Tensor, start: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.base, self.offset, self.shape, self.dtype, self.address = base, offset, shape, dtype, start + offset

    def get_device(self) -> int:
        return self.base.get_device()

    def tensor(self) -> Tensor:
        size = math.prod(self.shape) * self.dtype.itemsize
        return self.base[self.offset : self.offset + size].view(self.dtype).view(self.shape)


def workspace(device: torch.device, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Buffer]:
    """Many small buffers (shape, dtype) that live as long as one call, from one allocation."""
    offsets, total = _layout(wanted)
    base = torch.empty(total, dtype=torch.uint8, device=device)
    start = base.data_ptr()
    return [Buffer(base, start, offset, shape, dtype) for offset, (shape, dtype) in zip(offsets, wanted, strict=True)]


def stacked(many: int, size: int, device: torch.device) -> Tensor:
    """So many lists of fp32 numbers from one allocation; each begins where launches want a tensor to begin."""
    whole = ALIGNED // torch.float32.itemsize
    return torch.empty(many, cdiv(size, whole) * whole, dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=4096)
def _layout(wanted: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> tuple[list[int], int]:
    """Where each buffer begins, and how many bytes there are in all."""
    offsets, total = [], 0
    for shape, dtype in wanted:
        offsets.append(total)
        total += cdiv(math.prod(shape) * dtype.itemsize, 256) * 256
    return offsets, total


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | Buffer], numbers: tuple[Any, ...] = (),
    loose: Any = (), **flags: Any,
) -> None:  # fmt: skip
    """Run a kernel whose parameters are, in this order, tensors, numbers, loose numbers and constants.

    loose: numbers that change from call to call, such as the halves of a seed (see LOOSE in _jit.py). flags: its
    constants by name, and num_warps and the like.
    """
    if recording.tape is not None:
        recording.tape.launched(
            kernel, grid, tensors, numbers, loose, flags, lambda: launch(kernel, grid, tensors, numbers, loose, **flags)
        )
        return
    if INTERPRETING or _hooks:
        ordinary(kernel, grid, tensors, numbers, loose, flags)
        return
    addresses = [x.address if type(x) is Buffer else x.data_ptr() for x in tensors]  # type: ignore[union-attr]
    joined, device = 0, tensors[0].get_device()
    for address in addresses:
        joined |= address
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            ordinary(kernel, grid, tensors, numbers, loose, flags)
        return
    if joined % ALIGNED:
        ordinary(kernel, grid, tensors, numbers, loose, flags)
        return
    key = _key(kernel, tensors, numbers, flags)
    plan = _plans.get(key, ())
    if plan:
        run, function, head, constants = plan
        across, down, deep = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        try:
            run(across, down, deep, stream, function, *head, *addresses, *numbers, *loose, *constants)
            return
        except TypeError:  # the arguments are not those that this Triton's launcher takes: nothing has been launched
            plan = _plans[key] = None
    compiled = ordinary(kernel, grid, tensors, numbers, loose, flags)
    if plan is not None:  # None: looked at before, and not to be called this way
        if len(_plans) >= PLANS:
            _plans.clear()
        _plans[key] = _planned(compiled, kernel, len(addresses) + len(numbers) + len(loose), flags)


def _key(
    kernel: Any, tensors: Sequence[Tensor | Buffer], numbers: tuple[Any, ...], flags: dict[str, Any]
) -> tuple[Any, ...]:
    return id(kernel), tensors[0].get_device(), numbers, *[x.dtype for x in tensors], *flags, *flags.values()


def plan_of(
    kernel: Any, tensors: Sequence[Tensor | Buffer], numbers: tuple[Any, ...], flags: dict[str, Any]
) -> tuple[Any, ...] | None:
    """How a kernel that has been launched with these before is called by address; None: not known."""
    return _plans.get(_key(kernel, tensors, numbers, flags))


def ordinary(
    kernel: Any, grid: tuple[int, ...], tensors: Iterable[Any], numbers: Any, loose: Any, flags: dict[str, Any]
) -> Any:
    """Triton's own way."""
    plain = (x.tensor() if isinstance(x, Buffer) else x for x in tensors)
    return kernel.run(*plain, *numbers, *loose, grid=grid, warmup=False, **flags)


def _planned(compiled: Any, kernel: Any, given: int, flags: dict[str, Any]) -> tuple[Any, ...] | None:
    """What a later launch of the same needs; None where Triton's internals are not as expected."""
    try:
        constants = tuple(flags[name] for name in kernel.arg_names[given:])
        head = compiled.packed_metadata, None, None, None  # launch metadata and hooks
        launcher = compiled.run
        if getattr(launcher, "global_scratch_size", 1) == getattr(launcher, "profile_scratch_size", 1) == 0:
            # what the launcher's own __call__ does where a kernel asks for no memory; but kernels that wait for their
            # turn themselves (see ``in_turn``) are brought to the chip before it comes
            cooperative, target = launcher.launch_cooperative_grid, compiled.metadata.target
            dependent = not cooperative and target.backend == "cuda" and target.arch >= HOPPER
            dependent = dependent and "griddepcontrol.wait" in compiled.asm["ptx"]
            return launcher.launch, compiled.function, (cooperative, dependent, None, None, *head), constants
        return launcher, compiled.function, head, constants
    except (AttributeError, KeyError):
        return None
