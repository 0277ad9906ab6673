"""clusterattn: attention by clustering. Every method behind one call, ``ca.attention``."""

from typing import Any

from . import nn
from ._attention import attention, attention_matrix, groups
from ._plan import Plan
from ._tune import tune
from ._types import Attended, Buckets, Clusters, Mask, Method
from .clustering import NeuralClustering
from .measure.sampled import ErrorReport, error_report
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
    "ErrorReport",
    "Exact",
    "Improved",
    "Local",
    "Mask",
    "Method",
    "NeuralClustering",
    "OracleTop",
    "Plan",
    "Refined",
    "Reformer",
    "Routing",
    "RoutingState",
    "Smyrf",
    "attention",
    "attention_matrix",
    "error_report",
    "groups",
    "merge",
    "method",
    "nn",
    "tune",
]


def __getattr__(name: str) -> Any:
    """What needs more than torch is imported when it is first used: ``ca.hf`` transformers, ``ca.train`` accelerate."""
    if name in ("hf", "hosts", "models", "reproduce", "tasks", "train"):
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
