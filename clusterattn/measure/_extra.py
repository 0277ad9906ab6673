"""Third parties that the library itself can do without. All of them come with one extra."""

from __future__ import annotations

import importlib
from typing import Any

INSTALL = 'pip install "clusterattn[cli]"'


def need(module: str) -> Any:
    """Import a module of the extra, or say which extra is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        absent = f"{missing.name or module} is not installed"
        raise ModuleNotFoundError(
            f"{absent}; it comes with the commands: {INSTALL}", name=missing.name
        ) from None
