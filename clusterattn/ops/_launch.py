"""Launching kernels cheaply: what Triton finds out about a call is found out once for each shape.

Triton's own launch binds the arguments, looks at every one of them and at its options, and only then knows which
compiled kernel to run: tens of microseconds, more than most kernels here take. ``launch`` keeps the compiled kernel by
(kernel, device, dtypes, numbers, flags) and calls it straight away. Whatever is out of the ordinary (an interpreter, a
profiler's hooks, pointers that are not aligned, internals of Triton that look different) takes Triton's own way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._jit import HAVE_TRITON, INTERPRETING, triton

ALIGNED = 16  # bytes: what Triton looks for in a pointer
PLANS = 1 << 14  # how many are kept before all are forgotten

_plans: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}
# A profiler's hooks; a list in the Tritons we know, in others every launch takes the ordinary way
_hooks = getattr(triton.knobs.runtime.launch_enter_hook, "calls", [None]) if HAVE_TRITON else [None]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Buffer:
    """A buffer in a workspace. On a GPU it is an address; it becomes a tensor only where somebody needs one."""

    __slots__ = ("_base", "_offset", "_shape", "address", "dtype")

    def __init__(self, base: Tensor, start: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._base, self._offset, self._shape, self.dtype, self.address = base, offset, shape, dtype, start + offset

    def get_device(self) -> int:
        return self._base.get_device()

    def tensor(self) -> Tensor:
        size = math.prod(self._shape) * self.dtype.itemsize
        return self._base[self._offset : self._offset + size].view(self.dtype).view(self._shape)


def workspace(device: torch.device, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Buffer]:
    """Many small buffers (shape, dtype) that live as long as one call, from one allocation."""
    offsets, total = _layout(wanted)
    base = torch.empty(total, dtype=torch.uint8, device=device)
    start = base.data_ptr()
    return [Buffer(base, start, offset, shape, dtype) for offset, (shape, dtype) in zip(offsets, wanted, strict=True)]


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
) -> Any:  # fmt: skip
    """Run a kernel whose parameters are, in this order, tensors, numbers, loose numbers and constants.

    loose: numbers that change from call to call, such as the halves of a seed (see LOOSE in _jit.py). flags: its
    constants by name, and num_warps and the like.
    """
    if INTERPRETING or _hooks:
        return _ordinary(kernel, grid, tensors, numbers, loose, flags)
    addresses = [x.address if type(x) is Buffer else x.data_ptr() for x in tensors]  # type: ignore[union-attr]
    joined, device = 0, tensors[0].get_device()
    for address in addresses:
        joined |= address
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _ordinary(kernel, grid, tensors, numbers, loose, flags)
    if joined % ALIGNED:
        return _ordinary(kernel, grid, tensors, numbers, loose, flags)
    key = (id(kernel), device, numbers, *[x.dtype for x in tensors], *flags, *flags.values())
    plan = _plans.get(key, ())
    if plan:
        run, function, metadata, constants = plan
        across, down, deep = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        try:
            run(
                across, down, deep, stream, function, metadata, None, None, None,
                *addresses, *numbers, *loose, *constants,
            )  # fmt: skip
            return None
        except TypeError:  # the arguments are not those that this Triton's launcher takes: nothing has been launched
            plan = _plans[key] = None
    compiled = _ordinary(kernel, grid, tensors, numbers, loose, flags)
    if plan is not None:  # None: looked at before, and not to be called this way
        if len(_plans) >= PLANS:
            _plans.clear()
        _plans[key] = _planned(compiled, kernel, len(addresses) + len(numbers) + len(loose), flags)
    return None


def _ordinary(
    kernel: Any, grid: tuple[int, ...], tensors: Iterable[Any], numbers: Any, loose: Any, flags: dict[str, Any]
) -> Any:
    plain = (x.tensor() if isinstance(x, Buffer) else x for x in tensors)
    return kernel.run(*plain, *numbers, *loose, grid=grid, warmup=False, **flags)


def _planned(compiled: Any, kernel: Any, given: int, flags: dict[str, Any]) -> tuple[Any, ...] | None:
    """What a later launch of the same needs; None where Triton's internals are not as expected."""
    try:
        constants = tuple(flags[name] for name in kernel.arg_names[given:])
        return compiled.run, compiled.function, compiled.packed_metadata, constants
    except (AttributeError, KeyError):
        return None
