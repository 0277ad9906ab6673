"""clusterattn: attention by clustering. Every method behind one call, ``ca.attention``."""

from . import nn
from ._attention import attention, attention_matrix, groups
from ._types import Attended, Buckets, Clusters, Mask, Method
from .methods import (
    METHODS,
    Clustered,
    ClusterFormer,
    ClusterFormerState,
    Exact,
    Improved,
    Local,
    OracleTop,
    Refined,
    Reformer,
    Routing,
    RoutingState,
    Smyrf,
    method,
)
from .ops.merge import merge

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Attended",
    "Buckets",
    "ClusterFormer",
    "ClusterFormerState",
    "Clustered",
    "Clusters",
    "Exact",
    "Improved",
    "Local",
    "Mask",
    "Method",
    "OracleTop",
    "Refined",
    "Reformer",
    "Routing",
    "RoutingState",
    "Smyrf",
    "attention",
    "attention_matrix",
    "groups",
    "merge",
    "method",
    "nn",
]
