"""The verbs. A backend is a table of functions whose name travels as an argument; nothing is swapped behind anyone's
back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .._errors import bad_value
from . import _backends, beside, bucketed, coarse, draw, fine, hashing, kmeans, members, merge, rows, tables
from ._backends import Backend, Served, add
from ._jit import why_no_kernels
from ._served import BY_TORCH, TRITON

__all__ = [
    "VERBS", "Backend", "Ops", "Served", "add", "beside", "bucketed", "choose", "coarse", "draw", "fine", "hashing",
    "kmeans", "members", "merge", "rows", "tables", "verbs",
]  # fmt: skip

# Each keeps the contract written in its folder, whichever backend serves it.
VERBS: tuple[Callable[..., Any], ...] = (
    kmeans.codes, kmeans.covariance, kmeans.farthest, kmeans.kmeans, kmeans.nearest, kmeans.lloyd, kmeans.assign,
    beside.view, beside.beside, beside.nearest_beside, members.members, kmeans.means, rows.take, rows.broadcast,
    coarse.coarse, coarse.closest, coarse.shares, coarse.top_keys, fine.near_and_far,
    bucketed.bucketed, bucketed.itself_at_least,
    hashing.directions, hashing.scores, hashing.lifts, hashing.polytope, hashing.balanced, hashing.chunked,
    hashing.unit,
)  # fmt: skip


class Ops:
    """The verbs as one backend serves them: ``ops.<verb>(...)``."""

    def __init__(self, backend: str) -> None:
        for verb in VERBS:
            setattr(self, verb.__name__, partial(verb, backend=backend))

    if TYPE_CHECKING:

        def __getattr__(self, verb: str) -> Callable[..., Any]: ...


for _backend in (BY_TORCH, TRITON):
    add(_backend)

_OPS: dict[str, Ops] = {}


def choose(backend: str) -> Ops:
    """The verbs for this call. "auto" takes the fastest that can serve it, any other name insists on it."""
    if backend not in _OPS:
        if backend not in _backends.names():
            raise bad_value(f"backend one of {', '.join(_backends.names())}", repr(backend), 'backend="auto"')
        _OPS[backend] = Ops(backend)
    return _OPS[backend]


def verbs(device: torch.device | str = "cpu") -> list[tuple[str, str, str]]:
    """(verb, backend that "auto" takes, why not a kernel) for each verb on a device."""
    reason = why_no_kernels(torch.empty(1, 1, device=torch.device(device))) or ""
    listed = []
    for name in (verb.__name__ for verb in VERBS):
        why = reason if _backends.has_kernel(name) else f"{name} has no kernel: torch's own operators serve it"
        listed.append((name, "reference" if why else "triton", why))
    return listed
