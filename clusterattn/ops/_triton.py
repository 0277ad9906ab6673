"""The Triton backend: which kernel serves which verb, and when it cannot."""

from __future__ import annotations

from ._backends import Backend, Served
from ._jit import why_no_kernels
from .beside import kernels as beside_kernels
from .bucketed import backward_kernels as bucketed_backward_kernels
from .bucketed import kernels as bucketed_kernels
from .coarse import served as coarse_served
from .fine import served as fine_served
from .hashing import kernels as hashing_kernels
from .kmeans import kernels as kmeans_kernels
from .kmeans import moments
from .members import kernels as member_kernels
from .rows import kernels as row_kernels
from .rows import plain_take

TRITON = Backend(
    "triton",
    {
        "codes": Served(kmeans_kernels.why_not, kmeans_kernels.codes),
        "covariance": Served(kmeans_kernels.why_not, moments.covariance),
        "farthest": Served(kmeans_kernels.why_not, kmeans_kernels.farthest),
        "kmeans": Served(kmeans_kernels.why_not, kmeans_kernels.kmeans),
        "nearest": Served(kmeans_kernels.why_not, kmeans_kernels.nearest),
        "lloyd": Served(kmeans_kernels.why_not, kmeans_kernels.lloyd),
        "assign": Served(kmeans_kernels.why_not, kmeans_kernels.nearest),
        "members": Served(member_kernels.why_not, member_kernels.by_label),
        "means": Served(kmeans_kernels.why_not_means, kmeans_kernels.means),
        "take": Served(why_no_kernels, plain_take, row_kernels.take_backward),
        "broadcast": Served(why_no_kernels, row_kernels.broadcast, row_kernels.broadcast_backward),
        "coarse": Served(coarse_served.why_not, coarse_served.forward, coarse_served.backward),
        "near_and_far": Served(fine_served.why_not, fine_served.forward, fine_served.backward),
        "beside": Served(beside_kernels.why_not, beside_kernels.beside),
        "bucketed": Served(bucketed_kernels.why_not, bucketed_kernels.forward, bucketed_backward_kernels.backward),
        "directions": Served(why_no_kernels, hashing_kernels.directions),
        "scores": Served(hashing_kernels.why_not, hashing_kernels.scores),
        "polytope": Served(hashing_kernels.why_not, hashing_kernels.polytope),
        "balanced": Served(hashing_kernels.why_not, hashing_kernels.balanced),
        "chunked": Served(hashing_kernels.why_not, hashing_kernels.chunked),
        "unit": Served(hashing_kernels.why_not, hashing_kernels.unit, hashing_kernels.unit_backward),
    },
    keeps_dtype=True,
)
