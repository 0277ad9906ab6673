"""The verbs. A backend is a table of functions that travels as an argument; nothing is swapped behind anyone's back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from .._errors import bad_value
from . import bucketed as _bucketed
from . import coarse as _coarse
from . import fine as _fine
from . import kmeans as _kmeans

BACKENDS = ("auto", "reference", "triton")


@dataclass(frozen=True)
class Ops:
    """One backend: each verb keeps the contract written in its folder."""

    codes: Callable[..., torch.Tensor]
    lloyd: Callable[..., torch.Tensor]
    assign: Callable[..., torch.Tensor]
    farthest: Callable[..., torch.Tensor]
    coarse: Callable[..., _coarse.Coarse]
    top_keys: Callable[..., torch.Tensor]
    fine: Callable[..., _bucketed.Attended]
    bucketed: Callable[..., _bucketed.Attended]


REFERENCE = Ops(
    codes=_kmeans.codes,
    lloyd=_kmeans.lloyd,
    assign=_kmeans.assign,
    farthest=_kmeans.farthest,
    coarse=_coarse.coarse,
    top_keys=_coarse.top_keys,
    fine=_fine.fine,
    bucketed=_bucketed.bucketed,
)


def why_not(verb: str, device: torch.device) -> str:
    """Why no Triton kernel serves this verb: one sentence."""
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, this is {device.type}"
    return f"{verb} has no Triton kernel in this version"


def choose(backend: str, device: torch.device) -> Ops:
    """The verbs for this call. "auto" takes the fastest that can serve it, "triton" insists."""
    if backend not in BACKENDS:
        raise bad_value(f"backend one of {', '.join(BACKENDS)}", repr(backend), 'backend="auto"')
    if backend == "triton":
        reason = why_not("attention by clustering", device)
        raise bad_value("a call that Triton kernels can serve", reason, 'backend="auto" or "reference"')
    return REFERENCE


def verbs(device: torch.device | str = "cpu") -> list[tuple[str, str, str]]:
    """(verb, backend that "auto" takes, why not a kernel) for each verb on a device."""
    return [(verb.name, "reference", why_not(verb.name, torch.device(device))) for verb in fields(Ops)]
