"""A verb's tensor function, defined once and called in two ways.

Most people call eagerly, where crossing torch.library costs more than many a kernel: there an op is a plain function,
or one ``autograd.Function`` when a gradient is wanted. Whoever must see one operator (a compiler, an exporter, fake
tensors, a dispatch mode that counts or checks) gets the ``torch.library`` op of the same name. Both run the same
function, with autocast off, and share one backward.

    @op("twice")
    def _twice(x: Tensor) -> Tensor: ...

    @_twice.fake
    def _(x: Tensor) -> Tensor: ...

    _twice.gradient(give_back, keep)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.utils.flop_counter import register_flop_formula

from .._errors import complaint
from ._launch import recording

_ORDINARY = (Tensor, torch.nn.Parameter)


def op(name: str) -> Callable[[Callable[..., Any]], Op]:
    """Make ``clusterattn::name`` of a function of tensors and plain values. Arguments are passed by position."""
    return lambda forward: Op(name, forward)


class Op:
    """One function of tensors: plain where nobody looks, ``torch.ops.clusterattn.<name>`` where somebody does."""

    def __init__(self, name: str, forward: Callable[..., Any]) -> None:
        def plain(*args: Any) -> Any:
            if not torch._C._is_any_autocast_enabled():
                return forward(*args)
            kind = next(x for x in args if isinstance(x, Tensor)).device.type
            with torch.autocast(kind, enabled=False):
                return forward(*args)

        schema = torch.library.infer_schema(forward, mutates_args=())
        self.name, self._plain = name, plain
        self._defined = torch.library.custom_op(f"clusterattn::{name}", plain, mutates_args=(), schema=schema)
        self._traced = self._defined._opoverload
        self._function, self._differentiable = self._as_function(_keep_nothing, self._refuse), False
        self.__doc__ = forward.__doc__

    def _refuse(self, *_: Any) -> Any:
        raise NotImplementedError(
            complaint(
                "first derivatives of what has a gradient",
                f"a derivative of clusterattn's {self.name}, which has none",
                "dropping create_graph=True, .detach(), or method=ca.Exact() where second derivatives are needed",
            )
        )

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the shapes and dtypes of the outputs."""
        self._defined.register_fake(function)
        return function

    def gradient(self, give_back: Callable[..., Any], keep: Callable[..., None]) -> None:
        """Register the backward.

        keep(ctx, inputs, output) saves what backward needs. give_back(ctx, *gradients) returns the gradients of the
        first inputs, the others have none; a gradient that nobody sent is None, not a tensor of zeros. What it
        computes is an op of its own, without a gradient: first derivatives only.
        """

        def keep_for_both(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.set_materialize_grads(False)
            ctx.inputs = len(inputs)
            keep(ctx, inputs, output)

        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
            found = give_back(ctx, *gradients)
            found = found if isinstance(found, tuple) else (found,)
            return *found, *[None] * (ctx.inputs - len(found))

        self._defined.register_autograd(backward, setup_context=keep_for_both)
        self._function, self._differentiable = self._as_function(keep_for_both, backward), True

    def _as_function(self, keep: Callable[..., None], backward: Callable[..., Any]) -> type[Function]:
        parts = {"forward": self._plain, "setup_context": keep, "backward": backward}
        return type(f"{self.name}_function", (Function,), {part: staticmethod(f) for part, f in parts.items()})

    def flops(self, formula: Callable[..., int]) -> Callable[..., int]:
        """Register what torch's FlopCounterMode counts: two for a multiply-add. The formula takes the op's arguments,
        shapes standing for tensors."""

        def counted(*args: Any, out_shape: Any = None, **named: Any) -> int:
            return formula(*args, **named)

        register_flop_formula(self._traced._overloadpacket)(counted)
        return formula

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._traced(*args)
        if forward_ad._current_level >= 0 and self._differentiable:
            _refuse_tangents(self.name, args)
        if torch._C._are_functorch_transforms_active():  # torch.func takes functions, not torch.library's gradients
            return self._function.apply(*args)  # type: ignore[no-untyped-call]
        # A mode: fake tensors, counting, checking. Whoever writes down what is launched wants to see inside.
        watched, wanted = torch._C._len_torch_dispatch_stack() > (recording.tape is not None), False
        for x in args:
            if isinstance(x, Tensor):
                watched = watched or type(x) not in _ORDINARY
                wanted = wanted or x.requires_grad
        if watched:
            return self._traced(*args)
        if wanted and torch.is_grad_enabled():
            # past the part of apply that serves torch.func: it takes longer than everything else here
            return super(Function, self._function).apply(*args)  # type: ignore[misc]
        return self._plain(*args)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse_tangents(name: str, args: tuple[Any, ...]) -> None:
    """Forward-mode derivatives would be silently zero behind an op that knows backward alone."""
    duals = (forward_ad.unpack_dual(x) for x in args if isinstance(x, Tensor))  # type: ignore[no-untyped-call]
    if any(dual.tangent is not None for dual in duals):
        raise NotImplementedError(
            complaint(
                "derivatives in reverse mode",
                f"a forward-mode tangent (torch.func.jvp, jacfwd, dual tensors) in clusterattn's {name}",
                "torch.autograd.grad, torch.func.vjp, or method=ca.Exact()",
            )
        )
