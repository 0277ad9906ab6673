"""What a first call compiles ahead, for a GPU that is not there (see test_ahead.py): prints JSON."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import suppress
from typing import Any

import compile_kernels  # first: it turns the interpreter off
import torch
import triton
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

import clusterattn as ca
from clusterattn.ops import _ahead

RUN, SPEC, SIZE = JITFunction.run, "clustered:clusters=8,steps=1,metric=euclid", (1, 2, 40, 16)


class Device(compile_kernels.Device):
    """The same, in one piece, with a stream."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Happened(Exception):
    """Instead of the call itself, whose launches would find nobody."""


def call(grad: bool, made: bool = True) -> tuple[set[str], list[str]]:
    """The kernels that a call launches, forward and backward, if it is made; and those that were compiled before it."""
    leaves = [torch.zeros(SIZE, dtype=torch.float16, requires_grad=grad) for _ in range(3)]
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda **told: compiled.append(told["metadata"]["name"])
    JITFunction.run, rehearse = RUN, _ahead.rehearse

    def stop(run: Any, device: Any) -> None:
        rehearse(run, device)
        raise Happened

    _ahead.rehearse = stop
    with suppress(Happened):
        ca.attention(*leaves, method=SPEC)
    _ahead.rehearse = rehearse
    if not made:
        return set(), compiled
    collected.found.clear()
    JITFunction.run = lambda kernel, *args, **flags: collected.run(kernel, *args, **flags)
    out = ca.attention(*leaves, method=SPEC)  # no first call any more
    if grad:
        torch.autograd.grad(out, leaves, torch.zeros_like(out), allow_unused=True)
    return {name.rpartition(".")[2] for name, _ in collected.found}, compiled


collected = compile_kernels.collecting()
driver.set_active(Device())
torch.Tensor.is_cuda = property(lambda x: True)  # type: ignore[assignment,misc]
torch.cuda.is_current_stream_capturing = lambda: False
ca.replay(False)
told: dict[str, Any] = {}
for name, grad in (("forward", False), ("both", True)):
    launched, compiled = call(grad)
    told[name] = {"launched": sorted(launched), "compiled": sorted(compiled)}
x = torch.zeros(SIZE, dtype=torch.float16)
can = {"plain": _ahead._can(x, x, x)}
with _ahead.Rehearsal():
    can["rehearsed"] = _ahead._can(x, x, x)
with torch._subclasses.FakeTensorMode():
    can["fake"] = _ahead._can(x, x, x)
torch.cuda.is_current_stream_capturing = lambda: True
can["captured"] = _ahead._can(x, x, x)
torch.cuda.is_current_stream_capturing = lambda: False
told |= {"kinds": len(_ahead._rehearsed), "can": can}
_ahead._rehearsed.clear()
kept: list[torch.Tensor] = []  # what a checkpoint around a call sees of its rehearsal
with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
    call(True, made=False)
told |= {"kinds checkpointed": len(_ahead._rehearsed), "kept": len(kept)}


class Counting(type(ca.method(SPEC))):  # type: ignore[misc]
    """A method of one's own."""

    runs = 0

    def attend(self, *given: Any) -> Any:
        Counting.runs += 1
        return super().attend(*given)


JITFunction.run = lambda kernel, *args, **flags: collected.run(kernel, *args, **flags)
ca.attention(x, x, x, method=Counting(clusters=8, steps=1, metric="euclid"))
told["runs"] = Counting.runs


def interrupted() -> None:
    """As Ctrl-C would while kernels are compiled; what saved itself for backward must go all the same."""
    leaf = x.clone().requires_grad_()
    out = torch.exp(leaf)
    left.append(weakref.ref(out))
    active_mode.get().submit("one", interrupt, None)  # type: ignore[union-attr,arg-type]


def interrupt() -> None:
    raise KeyboardInterrupt


left: list[Any] = []
try:
    _ahead.rehearse(interrupted, x.device)
except KeyboardInterrupt:
    told["interrupted"] = True
gc.collect()
told |= {"left": left[0]() is not None, "mode left": active_mode.get() is not None}
print(json.dumps(told))
