"""The kernels of a first call, compiled side by side.

A call of a new kind launches some forty kernels that are not there yet, forward and backward. Compiled when each is
launched, they take half a minute; a machine has many cores, and most of compiling needs no Python. So such a call is
rehearsed: everything but its launches runs, on memory that is all zeros (which are good positions and labels), while
threads compile what would have been launched. Then the call is made.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from .._types import Call, Groups, Method
from ._jit import HAVE_TRITON, INTERPRETING
from ._launch import recording
from ._recorder import EMPTY, Watch

try:
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
except ImportError:  # a Triton without it compiles kernel by kernel
    AsyncCompileMode = None

THREADS = 16
KINDS = 4096  # that are remembered before all are forgotten

_rehearsed: set[tuple[Any, ...]] = set()


class Rehearsal(Watch):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Within this context kernels are compiled and not launched."""

    launches = bound = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func._schema.name in EMPTY else found

    def launched(
        self, kernel: Any, grid: tuple[int, ...], tensors: Sequence[Any], numbers: tuple[Any, ...], loose: Any,
        flags: dict[str, Any], run: Callable[[], Any],
    ) -> None:  # fmt: skip
        plain = [x if isinstance(x, Tensor) else x.tensor() for x in tensors]
        with _disable_current_modes():
            kernel.run(*plain, *numbers, *loose, grid=grid, warmup=True, **flags)


class _Workers:
    """Compile, and load what was compiled: that takes a compiler of its own, for the code that launches it."""

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device) -> None:
        self.pool, self.device = pool, device

    def submit(self, compiling: Callable[[], Any]) -> Future[Any]:
        return self.pool.submit(self._ready, compiling)

    def _ready(self, compiling: Callable[[], Any]) -> Any:
        with _current(self.device):  # kernels ask the thread's device what it can do
            kernel = compiling()
            if self.device.type == "cuda":
                kernel.run  # noqa: B018 (a property that loads)
        return kernel


def _current(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _as_it_is(x: Tensor) -> Tensor:
    return x


def rehearse(run: Callable[[], object], device: torch.device) -> None:
    """Compile what ``run`` would launch. Whatever goes wrong here will go wrong in the call itself, which tells it."""
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "clusterattn")
    try:
        with (
            _current(device),  # Triton keeps what it compiles by the current device
            AsyncCompileMode(_Workers(pool, device), ignore_errors=True),
            torch.autograd.set_multithreading_enabled(False),
            # A checkpoint around it would count what is saved here; detached, for an output that saves itself is kept
            saved_tensors_hooks(Tensor.detach, _as_it_is),
            Rehearsal(),  # type: ignore[no-untyped-call]
        ):
            run()
    except Exception as reason:
        logging.getLogger("clusterattn").debug("a call could not be rehearsed: %s", reason)
    finally:
        pool.shutdown(cancel_futures=True)
        active_mode.set(None)  # Triton leaves it where an interrupt comes while it waits


def before(
    answered: Callable[[Tensor, Tensor, Tensor], tuple[Any, Any]], recipe: Method, given: Groups, call: Call, q: Tensor,
    k: Tensor, v: Tensor,
) -> None:  # fmt: skip
    """Where this is the first call of its kind on a GPU, compile what it and its backward will launch.

    A method from elsewhere is not run more often than it is asked for: it may draw, or count.
    """
    if type(recipe).__module__.partition(".")[0] != __name__.partition(".")[0]:
        return
    mask, train = call.mask, torch.is_grad_enabled()
    masks = mask.causal, mask.keys is None, mask.queries is None
    leaves = tuple((x.dtype, x.device, x.shape[3], train and x.requires_grad) for x in (q, k, v))
    kind = recipe, given is None, call.parts is None, call.lse, call.ops, *masks, *leaves
    if kind in _rehearsed or not _can(q, k, v):
        return
    if len(_rehearsed) >= KINDS:
        _rehearsed.clear()
    _rehearsed.add(kind)
    alone = [x.detach().requires_grad_(x.requires_grad) for x in (q, k, v)]

    wanted = [x for x in alone if x.requires_grad]

    def both() -> None:
        out = answered(*alone)[0].out
        if out.requires_grad and wanted:
            torch.autograd.grad(out, wanted, torch.zeros_like(out), allow_unused=True)

    rehearse(both, q.device)


def _can(*tensors: Tensor) -> bool:
    """Nobody watches, and nothing is written down."""
    return (
        HAVE_TRITON
        and not INTERPRETING
        and AsyncCompileMode is not None
        and active_mode.get() is None
        and recording.tape is None
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and all(x.is_cuda and type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
        and not torch.cuda.is_current_stream_capturing()
    )
