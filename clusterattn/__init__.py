"""clusterattn: attention by clustering. Every method behind one call, ``ca.attention``.

Importing it loads torch and attention; everything else (``ca.nn``, ``ca.tune``, ``ca.hf``, ...) is loaded when it is
first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import _moved
from ._attention import attention, attention_matrix, groups
from ._types import Attended, Buckets, Clusters, Mask, Method, Parts
from .methods import (
    METHODS,
    Auto,
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

if TYPE_CHECKING:
    from . import hf as hf
    from . import measure, nn, parallel
    from ._plan import Plan
    from ._replay import replay
    from ._varlen import varlen_attention
    from ._warm_up import warm_up
    from .measure.sampled import ErrorReport, error_report
    from .tuning import Advice, advise, tune

# loaded when first used: name -> the module that has it, or that it is
_LATER = {
    "Advice": "tuning",
    "__version__": "_version",
    "ErrorReport": "measure.sampled",
    "Plan": "_plan",
    "advise": "tuning",
    "error_report": "measure.sampled",
    "hf": "hf",
    "hosts": "hosts",
    "measure": "measure",
    "nn": "nn",
    "parallel": "parallel",
    "tune": "tuning",
    "varlen_attention": "_varlen",
    "replay": "_replay",
    "warm_up": "_warm_up",
}

__all__ = [
    "METHODS",
    "Advice",
    "Attended",
    "Auto",
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
    "OracleTop",
    "Parts",
    "Plan",
    "Refined",
    "Reformer",
    "Routing",
    "RoutingState",
    "Smyrf",
    "__version__",
    "advise",
    "attention",
    "attention_matrix",
    "error_report",
    "groups",
    "hosts",
    "measure",
    "merge",
    "method",
    "nn",
    "parallel",
    "replay",
    "tune",
    "varlen_attention",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    """What is not loaded yet, once: afterwards it is an attribute like any other."""
    if name in _LATER:
        module = importlib.import_module(f".{_LATER[name]}", __name__)
        found = module if name == _LATER[name] else getattr(module, name)
    elif name in (*_moved.MODULES, *_moved.NAMES):
        found = _moved.attribute(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_LATER})
