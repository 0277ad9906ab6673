"""Third parties that the library itself can do without. They come with an extra: "cli", "hf" or "train"."""

from __future__ import annotations

import importlib
from typing import Any

FOR = {"cli": "the commands", "hf": "pretrained models", "train": "training"}


def need(module: str, extra: str = "cli") -> Any:
    """Import a module of an extra, or say which extra is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        absent = f"{missing.name or module} is not installed"
        raise ModuleNotFoundError(
            f'{absent}; it comes with {FOR[extra]}: pip install "clusterattn[{extra}]"', name=missing.name
        ) from None
