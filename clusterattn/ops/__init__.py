"""The verbs. A backend is a table of functions that travels as an argument; nothing is swapped behind anyone's back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from .._errors import bad_value
from .._types import Attended, Members
from ._jit import why_no_kernels
from .bucketed import bucketed
from .coarse import Coarse, coarse, top_keys
from .fine import near_and_far
from .hashing import balanced, chunked, directions, polytope, scores, unit
from .kmeans import Centres, assign, codes, covariance, farthest, kmeans, lloyd, means, nearest
from .members import members
from .rows import broadcast, take

BACKENDS = ("auto", "reference", "triton")


@dataclass(frozen=True)
class Ops:
    """The verbs as one backend serves them: each keeps the contract written in its folder."""

    codes: Callable[..., Tensor]
    covariance: Callable[..., Tensor]
    farthest: Callable[..., Tensor]
    kmeans: Callable[..., Centres]
    nearest: Callable[..., Tensor]
    lloyd: Callable[..., Tensor]
    assign: Callable[..., Tensor]
    members: Callable[..., Members | None]
    means: Callable[..., tuple[Tensor, Tensor]]
    take: Callable[..., Tensor]
    broadcast: Callable[..., Tensor]
    coarse: Callable[..., Coarse]
    top_keys: Callable[..., Tensor]
    near_and_far: Callable[..., Attended]
    bucketed: Callable[..., Attended]
    directions: Callable[..., Tensor]
    scores: Callable[..., tuple[Tensor, Tensor]]
    polytope: Callable[..., Tensor]
    balanced: Callable[..., tuple[Tensor, Tensor]]
    chunked: Callable[..., tuple[Tensor, Tensor]]
    unit: Callable[..., Tensor]


WITH_KERNELS = (
    "codes", "covariance", "farthest", "kmeans", "nearest", "lloyd", "assign", "members", "means", "take", "broadcast",
    "coarse", "near_and_far", "bucketed", "directions", "scores", "polytope", "balanced", "chunked", "unit",
)  # fmt: skip


def _served_by(backend: str) -> Ops:
    verb = partial(partial, backend=backend)
    return Ops(
        codes=verb(codes),
        covariance=verb(covariance), farthest=verb(farthest), kmeans=verb(kmeans), nearest=verb(nearest),
        lloyd=verb(lloyd), assign=verb(assign), members=verb(members), means=verb(means),
        take=verb(take), broadcast=verb(broadcast),
        coarse=verb(coarse), top_keys=top_keys, near_and_far=verb(near_and_far), bucketed=verb(bucketed),
        directions=verb(directions), scores=verb(scores), polytope=verb(polytope),
        balanced=verb(balanced), chunked=verb(chunked), unit=verb(unit),
    )  # fmt: skip


_TABLES = {backend: _served_by(backend) for backend in BACKENDS}


def choose(backend: str) -> Ops:
    """The verbs for this call. "auto" takes the fastest that can serve it, "triton" insists on a verb's kernel."""
    if backend not in _TABLES:
        raise bad_value(f"backend one of {', '.join(BACKENDS)}", repr(backend), 'backend="auto"')
    return _TABLES[backend]


def verbs(device: torch.device | str = "cpu") -> list[tuple[str, str, str]]:
    """(verb, backend that "auto" takes, why not a kernel) for each verb on a device."""
    reason = why_no_kernels(torch.empty(1, 1, device=torch.device(device))) or ""
    listed = []
    for verb in fields(Ops):
        why = reason if verb.name in WITH_KERNELS else f"{verb.name} has no kernel: torch's own operators serve it"
        listed.append((verb.name, "reference" if why else "triton", why))
    return listed
