"""What a swap did, layer by layer, and sentences that are said once: the same for every host."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ._plan import LayerPlan
from ._types import Method

_log = logging.getLogger("clusterattn")


class LayerRow(NamedTuple):
    layer: str
    method: str  # in short form, or "exact"
    reason: str  # why it stays exact, or ""


@dataclass(frozen=True)
class Report:
    """What a swap did, layer by layer. Its text is a table.

    Attributes:
        rows: one for each attention layer
        exact_below: shorter sequences stay exact
    """

    rows: tuple[LayerRow, ...]
    exact_below: int = 0

    @property
    def swapped(self) -> list[str]:
        """Names of the layers that a method answers for."""
        return [row.layer for row in self.rows if not row.reason]

    @property
    def kept(self) -> list[str]:
        """Names of the layers that stay exact."""
        return [row.layer for row in self.rows if row.reason]

    def __str__(self) -> str:
        wide = max((len(row.layer) for row in self.rows), default=0)
        lines = [f"{row.layer:<{wide}}  {row.method}" + (f": {row.reason}" if row.reason else "") for row in self.rows]
        summary = f"{len(self.swapped)} of {len(self.rows)} attention layers swapped"
        return "\n".join([*lines, summary + (f"; exact below {self.exact_below} tokens" if self.exact_below else "")])


def text(method: LayerPlan) -> str:
    """A layer's method in short form; several heads' as "refined ×3, exact ×9"."""
    if isinstance(method, Method):
        return str(method)
    return ", ".join(f"{each} ×{method.count(each)}" for each in dict.fromkeys(method))


def log_once(layer: str, reason: str) -> None:
    """Log why a layer that a method was to serve is exact after all, the first time; compiled code says nothing."""
    if not torch.compiler.is_compiling():
        _logged(layer, reason)


@functools.cache
def _logged(layer: str, reason: str) -> None:
    _log.warning("%s stays exact: %s", layer, reason)
