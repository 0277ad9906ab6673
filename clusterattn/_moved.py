"""Names that moved to ``clusterattn_papers`` in 0.2. The old ones forward, with one warning each, until 0.3.

An import of ``clusterattn.tasks.glue`` ends at the very module ``clusterattn_papers.tasks.glue``: there is one copy of
every class, whichever name it was reached by.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OLD, NEW = "clusterattn", "clusterattn_papers"
MODULES = ("clustering", "models", "reproduce", "tasks", "train")
NAMES = {"NeuralClustering": "clustering"}


def attribute(name: str) -> Any:
    """``clusterattn.<name>`` as it was: a module that moved, or a class in one."""
    module = NAMES.get(name)
    _warn(f"{OLD}.{name}", f"{NEW}.{name if module is None else f'{module}.{name}'}", stacklevel=4)
    found = importlib.import_module(f"{NEW}.{module or name}")
    return found if module is None else getattr(found, name)


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes in 0.3", DeprecationWarning, stacklevel=stacklevel)


class Forward(MetaPathFinder, Loader):
    """Finds the old names. It is asked first: Python's own finder would load a second copy of what is in a package."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        return ModuleSpec(name, self) if package == OLD and rest.partition(".")[0] in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        new = NEW + module.__name__.removeprefix(OLD)
        if module.__name__.count(".") == 1:  # a package warns for all that is in it
            _warn(module.__name__, new, stacklevel=3)
        sys.modules[module.__name__] = importlib.import_module(new)


sys.meta_path.insert(0, Forward())
