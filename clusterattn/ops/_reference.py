"""The reference as a backend. Verbs that are plain torch where the reference serves them need no line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._backends import REFERENCE, Backend, Served
from .beside import reference as beside_reference
from .bucketed import reference as bucketed_reference
from .coarse import reference as coarse_reference
from .kmeans import reference as kmeans_reference


def _can(*_: Any) -> None:
    """The reference serves every call."""


def _coarse(c: Tensor, *rest: Any) -> tuple[coarse_reference.Found, Tensor]:
    """Kernels leave a bit mask of the near keys for backward; the reference needs none."""
    return coarse_reference.forward(c, *rest), c.new_empty((*c.shape[:3], 0), dtype=torch.int32)


def _coarse_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    wanted, bits = given[:-2] + given[-1:], given[-2]
    assert bits.numel() == 0
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = coarse_reference.backward
    return backward(*wanted)


BY_TORCH = Backend(
    REFERENCE,
    {
        "beside": Served(_can, beside_reference.beside),
        "bucketed": Served(_can, bucketed_reference.forward, bucketed_reference.backward),
        "coarse": Served(_can, _coarse, _coarse_backward),
        "covariance": Served(_can, kmeans_reference.covariance),
        "farthest": Served(_can, kmeans_reference.farthest),
        "kmeans": Served(_can, kmeans_reference.kmeans),
        "nearest": Served(_can, kmeans_reference.nearest),
        "lloyd": Served(_can, kmeans_reference.lloyd),
        "means": Served(_can, kmeans_reference.means),
    },
)
