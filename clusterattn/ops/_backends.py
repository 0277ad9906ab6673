"""Backends: a table verb -> (why not, function). Verbs look a backend up by its name, so that a new one touches none.

A backend's name travels through the schemas of the ops; its functions keep the contract of the reference's functions of
the same name. What it lacks, and what it cannot serve, the reference serves, which can do everything.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._errors import bad_value
from ._jit import INTERPRETING

REFERENCE, AUTO = "reference", "auto"


class Served(NamedTuple):
    """How a backend serves one verb: why it cannot serve these tensors (None: it can), and by which function."""

    why_not: Callable[..., str | None]
    function: Callable[..., Any]
    backward: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Backend:
    """One way to compute the verbs.

    keeps_dtype  answers come in the dtype of the inputs; otherwise in fp32 or better
    automatic    backend="auto" takes it where it can serve
    """

    name: str
    table: Mapping[str, Served]
    keeps_dtype: bool = False
    automatic: bool = True


_KNOWN: dict[str, Backend] = {}


def add(backend: Backend) -> None:
    """Make a backend known by its name. Later ones come first when "auto" chooses."""
    _KNOWN[backend.name] = backend


def names() -> tuple[str, ...]:
    return (AUTO, *_KNOWN)


def serving(verb: str, backend: str, *asked: Any) -> str:
    """The name of the backend that serves this call of a verb. "auto" says once why it is the reference; any other name
    insists. ``asked``: what the backend's why_not wants to see."""
    if backend == REFERENCE or (backend == AUTO and INTERPRETING):  # interpreting is for those who ask
        return REFERENCE
    reason = ""
    for known in reversed(_KNOWN.values()) if backend == AUTO else (_KNOWN[backend],):
        if verb in known.table and (known.automatic or backend != AUTO):
            why = known.table[verb].why_not(*asked)
            if why is None:
                return known.name
            reason = reason or why
    if backend != AUTO:
        raise bad_value(
            f"a call of {verb} that the backend {backend!r} can serve", reason, 'backend="auto" or "reference"'
        )
    if reason and not torch.compiler.is_compiling():
        _say_once(verb, reason)
    return REFERENCE


def function(verb: str, backend: str) -> Callable[..., Any]:
    return _KNOWN[backend].table[verb].function


def backward(verb: str, backend: str) -> Callable[..., Any]:
    found = _KNOWN[backend].table[verb].backward
    assert found is not None, f"{backend} has no backward of {verb}"
    return found


def keeps_dtype(backend: str) -> bool:
    return _KNOWN[backend].keeps_dtype


def has_kernel(verb: str) -> bool:
    """Is there more than the reference?"""
    return any(verb in known.table for known in _KNOWN.values() if known.name != REFERENCE)


@functools.cache
def _say_once(verb: str, reason: str) -> None:
    logging.getLogger("clusterattn").info("%s takes the reference path: %s", verb, reason)
