"""The reference as a backend. Verbs that are plain torch where the reference serves them need no line here."""

from __future__ import annotations

from typing import Any

from ._backends import REFERENCE, Backend, Served
from .bucketed import reference as bucketed_reference
from .kmeans import reference as kmeans_reference


def _can(*_: Any) -> None:
    """The reference serves every call."""


BY_TORCH = Backend(
    REFERENCE,
    {
        "bucketed": Served(_can, bucketed_reference.forward, bucketed_reference.backward),
        "covariance": Served(_can, kmeans_reference.covariance),
        "farthest": Served(_can, kmeans_reference.farthest),
        "kmeans": Served(_can, kmeans_reference.kmeans),
        "nearest": Served(_can, kmeans_reference.nearest),
        "lloyd": Served(_can, kmeans_reference.lloyd),
        "means": Served(_can, kmeans_reference.means),
    },
)
