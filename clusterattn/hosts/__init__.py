"""Other people's libraries and models: attention by clustering behind the seams that they leave for it.

One small module each, which imports its host when it is used: ``ca.hosts.tabpfn``, ``ca.hosts.diffusers``,
``ca.hosts.vggt``. (transformers has ``ca.hf``, torch's own layers ``ca.nn.swap``.)
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["diffusers", "tabpfn", "vggt"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
