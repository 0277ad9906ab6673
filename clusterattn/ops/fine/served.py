"""The verb near_and_far by kernels: its ops know tensors and numbers, the kernels nouns."""

from __future__ import annotations

from torch import Tensor

from ..._types import Members
from ..coarse.kernels import Far
from ..coarse.reference import Reach
from . import backward_kernels, kernels
from .kernels import FineSettings


def forward(
    q: Tensor, c: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, order: Tensor, first: Tensor,
    parts: Members | None, pi: Tensor | None, reach: Reach, mass: int, detach: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    settings = FineSettings(reach, mass, detach)
    out, lse, share, far = kernels.forward(q, c, k, v, keep, order, first, parts, pi, settings)
    return out, lse, share, far.out, far.mean_key, far.lse, far.near_lse, far.near_at, far.bits, far.slope


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, c: Tensor, k: Tensor, v: Tensor, keep: Tensor | None,
    labels: Tensor, order: Tensor, first: Tensor, parts: Members | None, pi: Tensor | None, counts: Tensor | None,
    out: Tensor, lse: Tensor, share: Tensor, far: tuple[Tensor, ...], reach: Reach, mass: int, detach: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return backward_kernels.backward(
        d_out, d_lse, q, c, k, v, keep, labels, order, first, parts, pi, counts, out, lse, share, Far(*far),
        FineSettings(reach, mass, detach),
    )  # fmt: skip
