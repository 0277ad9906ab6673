"""Third parties that the library itself can do without. They come with an extra: "cli", "hf" or "train"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

FOR = {"cli": "the commands", "hf": "pretrained models", "train": "training"}
# what an extra brings, as it is imported; pyproject.toml names the same as it is installed
MODULES = {
    "cli": ("typer", "rich", "matplotlib", "jinja2", "safetensors", "numpy"),
    "hf": ("transformers", "safetensors"),
    "train": (
        "accelerate", "safetensors", "tokenizers", "sacrebleu", "sklearn", "numpy", "transformers",
    ),
}  # fmt: skip


def need(module: str, extra: str = "cli") -> Any:
    """Import a module of an extra, or say which extra is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(absent(missing.name or module, extra), name=missing.name) from None


def missing(extra: str) -> str | None:
    """The first module of an extra that is not installed; None when all are. Nothing is imported to find out."""
    return next((module for module in MODULES[extra] if not _installed(module)), None)


def absent(module: str, extra: str) -> str:
    """The sentence about a module that is not there."""
    return f'{module} is not installed; it comes with {FOR[extra]}: pip install "clusterattn[{extra}]"'


def _installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None
