"""Calls that were made before are made again without asking again: the same method, shapes, strides and dtypes.

The first call of a kind goes the ordinary way, where everything is checked. From the second on, exact attention is
SDPA's own call, and a method by kernels is a tape (ops/_tape.py): one Python loop over its launches. The first backward
of a kind records forward and backward together; afterwards both are played.

Masks of keys and queries are inputs like q, k and v: what is in them may change from call to call. Whatever could
change what runs, or wants to see it, takes the ordinary way: lengths, groups and states, tensors that are not plain,
compilers, torch.func, dispatch modes, saved-tensor hooks (checkpoints), a CUDA graph in the making. Switched off by
``ca.replay(False)``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function, forward_ad

from ._types import Method
from .methods import Exact
from .methods.auto import times_kept
from .ops._jit import HAVE_TRITON, INTERPRETING
from .ops._launch import ALIGNED

MOST = 512  # kinds of calls that are remembered before all are forgotten
LAYOUTS = 4  # of a gradient, for each kind
Ordinary = Callable[..., Any]  # q, k, v, seed, key_mask, query_mask -> out, or (out, lse)
Masks = tuple["Tensor | None", "Tensor | None"]  # of keys and of queries

_known: dict[tuple[Any, ...], Known] = {}
_on = True


def replay(on: bool, *, graphs: bool = True) -> None:
    """Whether calls on a GPU that were made before are replayed (they are, by default): the same kernels, without the
    time that it takes to choose them; and as CUDA graphs, where the same memory comes again. Either call of this frees
    what was remembered.

    Args:
        on: whether calls are replayed from now on
        graphs: and whether those that come again with the same memory are replayed as CUDA graphs
    """
    global _on
    _on = on
    forget()
    if HAVE_TRITON:
        from .ops._graphs import graphs as of_plays

        of_plays.on = graphs


def forget() -> None:
    """Nothing is known of any call."""
    _known.clear()
    if HAVE_TRITON:
        from .ops._graphs import graphs

        graphs.forget()


def known(q: Tensor, k: Tensor, v: Tensor, masks: Masks, *settings: Any) -> Known | None:
    """What is known of calls like this one; None for one that takes the ordinary way."""
    device, dtype, cuda = q.device, q.dtype, q.is_cuda
    if (
        not _on
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        or not (_dense(q) and _dense(k) and _dense(v))
        or not all(x is None or (type(x) is Tensor and x.device == device and _dense(x)) for x in masks)
    ):
        return None
    if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) != dtype:
        return None
    grad = torch.is_grad_enabled() and (q.requires_grad, k.requires_grad, v.requires_grad)
    key = (
        settings,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        dtype,
        k.dtype,
        v.dtype,
        device,
        k.device,
        v.device,
        grad,
        masks[0] is masks[1],
        *((x.shape, x.stride(), x.dtype) for x in masks if x is not None),
        masks[0] is None,
        0 if cuda else torch.get_num_threads(),
        times_kept(),
    )
    found = _known.get(key)
    if found is None:
        if len(_known) >= MOST:
            _known.clear()
        found = _known[key] = Known(cuda or (INTERPRETING and settings[3] == "triton"))
    return found


def _dense(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested and not x.is_meta


class Known:
    """What is known of the calls of one kind."""

    __slots__ = ("_by_kernels", "_exact", "_masks", "_refused", "_seed", "_tape", "joint", "ordinary")

    def __init__(self, by_kernels: bool) -> None:
        self._refused, self._by_kernels = False, by_kernels
        self._exact: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        self._tape: Any = None
        self._seed = 0  # of a tape that holds it
        self._masks: tuple[int | None, int | None] = None, None  # those of keys and of queries: which of the inputs
        self.joint: dict[tuple[Any, ...], Any] = {}  # the layout of the gradients -> a tape with backward
        self.ordinary: Ordinary | None = None

    @property
    def learned(self) -> bool:
        return self.ordinary is not None

    def learn(
        self,
        recipe: Method,
        ordinary: Ordinary,
        q: Tensor,
        k: Tensor,
        masks: Masks,
        causal: bool,
        scale: float | None,
        lse: bool,
    ) -> None:
        """An ordinary call went well: the next one need not be."""
        keys, queries = masks
        last = 3 if keys is None or keys is queries else 4
        self.ordinary, self._masks = ordinary, (None if keys is None else 3, None if queries is None else last)
        self._refused = isinstance(recipe, Exact) or not self._by_kernels or 0 in q.shape or 0 in k.shape
        square, masked = not causal or q.shape[2] == k.shape[2], any(x is not None for x in masks)
        if isinstance(recipe, Exact) and not lse and not masked and square and 0 not in k.shape:
            self._exact = partial(
                F.scaled_dot_product_attention,
                is_causal=bool(causal),
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )

    def answer(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, seed: int) -> Tensor | tuple[Tensor, ...] | None:
        """The answer of a call like those before; None where it must be an ordinary one."""
        if self._exact is not None:
            return self._exact(q, k, v)
        inputs = (q, k, v, *_each_once(masks))
        if self.ordinary is None or self._refused or not _aligned(inputs):
            return None
        if q.is_cuda and (torch.cuda.is_current_stream_capturing() or q.get_device() != torch._C._cuda_getDevice()):
            return None
        if self._tape is None and not self._record(inputs, seed):
            return None
        if self._tape.bound and seed != self._seed:
            return None
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            found: Any = super(Function, Replayed).apply(self, seed, *inputs)  # type: ignore[no-untyped-call]
        else:
            found, _ = self._tape.forward.play(inputs, seed, None)
        return found[0] if len(found) == 1 else tuple(found)

    def _ordinarily(self, inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
        assert self.ordinary is not None
        keys, queries = (None if at is None else inputs[at] for at in self._masks)
        answer = self.ordinary(*inputs[:3], seed, key_mask=keys, query_mask=queries)
        return list(answer) if isinstance(answer, tuple) else [answer]

    def _record(self, inputs: Sequence[Tensor], seed: int) -> bool:
        """Write the forward pass down, by running it once more."""
        from .ops._recorder import CannotRecord, Recorder
        from .ops._tape import Tape

        if not _apart(inputs):
            return False
        inputs = [x.detach() for x in inputs]
        try:
            with torch.no_grad(), Recorder(inputs) as recorder:
                found = self._ordinarily(inputs, seed)
                outputs = [recorder.where(x) for x in found]
            self._tape, self._seed = Tape(recorder, outputs), seed
        except CannotRecord as reason:
            self._refuse(reason)
        return not self._refused

    def _refuse(self, reason: Exception) -> None:
        self._refused = True
        logging.getLogger("clusterattn").debug("calls of this kind are not replayed: %s", reason)

    def forward(self, inputs: Sequence[Tensor], seed: int) -> tuple[list[Tensor], Any, Any]:
        """Outputs, the tape that made them, and what it keeps for backward: the latest that knows one."""
        layout = next(reversed(self.joint), None)
        if layout is None:
            return self._tape.forward.play(inputs, seed, None)[0], None, None
        tape, there = self.joint[layout]
        found, kept = tape.forward.play(inputs, seed, None)
        return found, (layout, tape, there), kept

    def gradients(
        self, inputs: Sequence[Tensor], seed: int, wanted: Sequence[bool], given: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Forward once more, the ordinary way, and backward: written down where both can be."""
        from .ops._recorder import CannotRecord, Recorder

        recorder: Any = None
        if len(self.joint) < LAYOUTS and not torch.is_grad_enabled() and _apart(inputs):
            recorder = Recorder([x.detach() for x in inputs])
        try:
            return self._both(inputs, seed, wanted, given, recorder)
        except CannotRecord as reason:
            self._refuse(reason)
            return self._both(inputs, seed, wanted, given, None)

    def _both(
        self,
        inputs: Sequence[Tensor],
        seed: int,
        wanted: Sequence[bool],
        given: Sequence[Tensor | None],
        recorder: Any,
    ) -> list[Tensor | None]:
        from .ops._tape import Tape

        again = torch.is_grad_enabled()  # second derivatives: the graph of the first must be there
        leaves = list(inputs[:3]) if again else [
            x.detach().requires_grad_(want) for x, want in zip(inputs[:3], wanted, strict=True)
        ]  # fmt: skip
        middle, outputs, gradients = 0, [], []
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False), recorder or nullcontext():
            found = self._ordinarily([*leaves, *inputs[3:]], seed)
            if recorder is not None:
                outputs, middle = [recorder.where(x) for x in found], len(recorder.steps)
                for x in given:
                    if x is not None:
                        recorder.add_input(x)
            asked = [(x, each) for x, each in zip(found, given, strict=True) if each is not None]
            targets = [x for x, want in zip(leaves, wanted, strict=True) if want]
            got = iter(
                torch.autograd.grad(
                    [x for x, _ in asked], targets, [each for _, each in asked], create_graph=again, allow_unused=True
                )
            )
            answers = [next(got) if want else None for want in wanted]
            if recorder is not None:
                gradients = [recorder.where(x) for x in answers if x is not None]
        if recorder is not None:
            self.joint[layout_of(given)] = (
                Tape(recorder, outputs, middle, gradients),
                tuple(x is not None for x in answers),
            )
        return answers


class Replayed(Function):
    """A replayed call with a gradient: of q, k and v, which masks may follow."""

    @staticmethod
    def forward(ctx: Any, kind: Known, seed: int, *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.kind, ctx.seed, ctx.inputs = kind, seed, len(inputs)
        found, ctx.played, ctx.kept = kind.forward(inputs, seed)
        ctx.save_for_backward(*inputs, *found)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        inputs, wanted = ctx.saved_tensors[: ctx.inputs], ctx.needs_input_grad[2:5]
        masks = [None] * (ctx.inputs - 3)
        if ctx.played is not None and not torch.is_grad_enabled():
            layout, tape, there = ctx.played
            if layout == layout_of(given) and _aligned(given):
                found, _ = tape.backward.play((*inputs, *(x for x in given if x is not None)), ctx.seed, ctx.kept)
                answers = iter(found)
                return None, None, *(next(answers) if each else None for each in there), *masks
        return None, None, *ctx.kind.gradients(inputs, ctx.seed, wanted, given), *masks


def layout_of(given: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype) for x in given)


def _each_once(masks: Masks) -> list[Tensor]:
    """Self-attention has one mask for both."""
    keys, queries = masks
    return [x for x in (keys, None if queries is keys else queries) if x is not None]


def _apart(inputs: Sequence[Tensor]) -> bool:
    """Where two are one tensor, which of them a kernel reads cannot be seen."""
    return len({x.data_ptr() for x in inputs}) == len(inputs)


def _aligned(tensors: Sequence[Tensor | None]) -> bool:
    """Kernels were compiled for pointers that are."""
    joined = 0
    for x in tensors:
        if x is not None:
            joined |= x.data_ptr()
    return joined % ALIGNED == 0
