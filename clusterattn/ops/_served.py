"""The backends' tables: which function serves which verb, and when it cannot.

Functions are imported when one is first used: importing the library loads no kernel. The reasons why a kernel cannot
serve are asked in every call; each is one sentence, None when it can.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._types import Parts
from ._backends import REFERENCE, Backend, Served
from ._jit import HEAD_DIMS, why_no_kernels
from .rows import plain_take


def _late(place: str) -> Callable[..., Any]:
    """The function ``module.name`` below ops, imported when it is first called."""
    module, _, name = place.rpartition(".")
    found: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if not found:
            found.append(getattr(importlib.import_module(f".{module}", __package__), name))
        return found[0](*args)

    return call


# ---------------------------------------------------------------------------------------------------- the reference


def _can(*_: Any) -> None:
    """The reference serves every call."""


def _coarse(c: Tensor, *rest: Any) -> tuple[Any, Tensor]:
    """Kernels leave a bit mask of the near keys for backward; the reference needs none."""
    from .coarse import reference

    return reference.forward(c, *rest), c.new_empty((*c.shape[:2], 0, c.shape[2]), dtype=torch.int32)


def _coarse_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    from .coarse import reference

    wanted, bits = given[:-2] + given[-1:], given[-2]
    assert bits.numel() == 0
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = reference.backward
    return backward(*wanted)


# Verbs that are plain torch where the reference serves them need no line here.
BY_TORCH = Backend(
    REFERENCE,
    {
        "beside": Served(_can, _late("beside.reference.beside")),
        "bucketed": Served(_can, _late("bucketed.reference.forward"), _late("bucketed.reference.backward")),
        "coarse": Served(_can, _coarse, _coarse_backward),
        "closest": Served(_can, _late("coarse.exhaustive.closest")),
        "covariance": Served(_can, _late("kmeans.reference.covariance")),
        "farthest": Served(_can, _late("kmeans.reference.farthest")),
        "kmeans": Served(_can, _late("kmeans.reference.kmeans")),
        "nearest": Served(_can, _late("kmeans.reference.nearest")),
        "nearest_beside": Served(_can, _late("beside.reference.nearest_beside")),
        "lloyd": Served(_can, _late("kmeans.reference.lloyd")),
        "means": Served(_can, _late("kmeans.reference.means"), _late("kmeans.reference.means_backward")),
        "shares": Served(_can, _late("coarse.reference.shares")),
        "view": Served(_can, _late("beside.reference.view")),
    },
)

# ---------------------------------------------------------------------------------------------------- Triton

MOST_CLUSTERS, MOST_PARTS = 8190, 4096  # that one program counts
MOST_NEAR = 1024  # that it chooses
EMPTY = "there is nothing to launch for an empty tensor"


def _wide(v: Tensor) -> str | None:
    if v.shape[-1] <= HEAD_DIMS:
        return None
    return f"kernels hold value dimensions up to {HEAD_DIMS}, this one is {v.shape[-1]}"


def _why_not_points(x: Tensor) -> str | None:
    return why_no_kernels(x)


def _why_not_means(x: Tensor, members: object) -> str | None:
    return why_no_kernels(x) if members is not None else "the members are not sorted"


def _why_not_members(labels: Tensor, clusters: int, q: Tensor) -> str | None:
    if 0 in labels.shape or not clusters:
        return EMPTY
    if clusters > MOST_CLUSTERS:
        return f"kernels count up to {MOST_CLUSTERS} clusters, there are {clusters}"
    return why_no_kernels(q)


def _why_not_beside(k: Tensor, v: Tensor, seen_by: Tensor) -> str | None:
    if 0 in k.shape or 0 in v.shape or 0 in seen_by.shape:
        return EMPTY
    return _wide(v) or why_no_kernels(k)


def _why_not_coarse(c: Tensor, k: Tensor, v: Tensor, parts: int, slope: bool) -> str | None:
    if parts > 1 or slope:
        return "by itself coarse has kernels for one part and no slope"
    if 0 in c.shape or 0 in k.shape or 0 in v.shape:
        return EMPTY
    return _wide(v) or why_no_kernels(k)


def _why_not_closest(c: Tensor, points: Tensor, top: int) -> str | None:
    if 0 in c.shape or 0 in points.shape:
        return EMPTY
    if top > MOST_NEAR:
        return f"kernels choose up to {MOST_NEAR} points, {top} are asked for"
    return why_no_kernels(points)


def _why_not_near_and_far(
    q: Tensor, k: Tensor, v: Tensor, clusters: int, parts: Parts | None, slope: bool, causal: bool
) -> str | None:
    if 0 in q.shape or 0 in k.shape or 0 in v.shape or not clusters:
        return EMPTY
    if clusters > MOST_CLUSTERS or (parts is not None and parts.count > MOST_PARTS):
        counted = f"{clusters} and {1 if parts is None else parts.count}"
        return f"kernels count up to {MOST_CLUSTERS} clusters and {MOST_PARTS} parts, there are {counted}"
    if slope and causal:
        return "the slope's kernels know one block, causal calls have many"
    return _wide(v) or why_no_kernels(q)


def _why_not_bucketed(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor) -> str | None:
    if 0 in q.shape or 0 in k.shape or 0 in v.shape or 0 in queries.shape or 0 in keys.shape:
        return EMPTY
    return _wide(v) or why_no_kernels(q)


def _why_not_hashing(*tensors: Tensor) -> str | None:
    for x in tensors:
        reason = EMPTY if 0 in x.shape else why_no_kernels(x)
        if reason is not None:
            return reason
    return None


TRITON = Backend(
    "triton",
    {
        "codes": Served(_why_not_points, _late("kmeans.kernels.codes")),
        "covariance": Served(_why_not_points, _late("kmeans.moments.covariance")),
        "farthest": Served(_why_not_points, _late("kmeans.kernels.farthest")),
        "kmeans": Served(_why_not_points, _late("kmeans.kernels.kmeans")),
        "nearest": Served(_why_not_points, _late("kmeans.nearest_kernels.nearest")),
        "lloyd": Served(_why_not_points, _late("kmeans.kernels.lloyd")),
        "assign": Served(_why_not_points, _late("kmeans.nearest_kernels.nearest")),
        "members": Served(_why_not_members, _late("members.kernels.members")),
        "means": Served(_why_not_means, _late("kmeans.kernels.means"), _late("rows.kernels.broadcast")),
        "take": Served(why_no_kernels, plain_take, _late("rows.kernels.take_backward")),
        "broadcast": Served(why_no_kernels, _late("rows.kernels.broadcast"), _late("rows.kernels.broadcast_backward")),
        "coarse": Served(_why_not_coarse, _late("coarse.served.forward"), _late("coarse.served.backward")),
        "closest": Served(_why_not_closest, _late("coarse.near.closest")),
        "shares": Served(_why_not_points, _late("coarse.slope.shares")),
        "near_and_far": Served(_why_not_near_and_far, _late("fine.served.forward"), _late("fine.served.backward")),
        "view": Served(_why_not_beside, _late("beside.kernels.view")),
        "beside": Served(_why_not_beside, _late("beside.kernels.beside")),
        "nearest_beside": Served(_why_not_beside, _late("beside.kernels.nearest_beside")),
        "bucketed": Served(
            _why_not_bucketed, _late("bucketed.kernels.forward"), _late("bucketed.backward_kernels.backward")
        ),
        "scores": Served(_why_not_hashing, _late("hashing.kernels.scores")),
        "polytope": Served(_why_not_hashing, _late("hashing.kernels.polytope")),
        "balanced": Served(_why_not_hashing, _late("hashing.kernels.balanced")),
        "chunked": Served(_why_not_hashing, _late("hashing.kernels.chunked")),
        "unit": Served(_why_not_hashing, _late("hashing.kernels.unit"), _late("hashing.kernels.unit_backward")),
    },
    keeps_dtype=True,
)
