"""What torch.compile may run once and take for a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant(function: F) -> F:
    """Mark a pure function of plain values with plain values as its result: the compiler calls it while it traces,
    instead of tracing it. As ``torch.compiler.assume_constant_result``, which would import the whole compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
