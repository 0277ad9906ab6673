"""How the calls of a host were answered, counted; and a host that is missing or too old, in one sentence."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .._attention import attention
from .._layer_call import LayerCall
from .._plan import LayerPlan
from .._report import Report
from .._types import Method
from ..methods import Auto, Exact
from ..methods.budgets import Shape

FASTER = "exact attention is faster here"  # why a call of method="auto" stays exact


class Answered(NamedTuple):
    method: str  # in short form, or "exact"
    reason: str  # why it was exact, or ""
    calls: int


class CallCounts:
    """How many calls were answered how. Its text is a table. Calls inside compiled code are not seen."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, method: str, reason: str = "") -> None:
        if not torch.compiler.is_compiling():
            self._counts[method, reason] += 1

    def clear(self) -> None:
        self._counts.clear()

    @property
    def rows(self) -> tuple[Answered, ...]:
        """The most frequent first."""
        return tuple(Answered(method, reason, calls) for (method, reason), calls in self._counts.most_common())

    @property
    def swapped(self) -> int:
        """Calls that a method answered."""
        return sum(row.calls for row in self.rows if not row.reason)

    @property
    def kept(self) -> int:
        """Calls that stayed exact."""
        return sum(row.calls for row in self.rows if row.reason)

    def __str__(self) -> str:
        lines = [f"{row.calls:>7}  {row.method}" + (f": {row.reason}" if row.reason else "") for row in self.rows]
        return "\n".join([*lines, f"{self.swapped} of {self.swapped + self.kept} attention calls by clustering"])

    __repr__ = __str__


@dataclass(frozen=True)
class Swapped(Report):
    """The report of a swap that also counts calls."""

    served: CallCounts = field(default_factory=CallCounts)


def chosen(method: Method, shape: Shape, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Method, str]:
    """The method that answers a call of so many rows (b h), and why it is exact attention if method="auto" says so."""
    if not isinstance(method, Auto):
        return method, ""
    taken = method.choose(device, dtype, rows, shape)
    return taken, FASTER if isinstance(taken, Exact) else ""


def heads_first(x: Tensor) -> Tensor:
    """(b n h d), as hosts have it, to (b h n d). On a CPU a copy costs less than reading across it again and again."""
    turned = x.transpose(1, 2)
    return turned.contiguous() if x.device.type == "cpu" else turned


def answer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: LayerPlan,
    *,
    key_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(b n h d) in, (b n h e) out: by one method, or by one for each head."""
    call = LayerCall(heads_first(q), heads_first(k), heads_first(v), key_mask, None, causal, scale, method)
    return call.answer().transpose(1, 2)


def answer_with_weight(
    q: Tensor, k: Tensor, v: Tensor, method: Method, *, key_mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(b n h d) in, (b n h e) and the log-weight (b n h) out, which merges with those over other keys."""
    turned = (heads_first(x) for x in (q, k, v))
    out, lse = attention(*turned, method=method, key_mask=key_mask, scale=scale, return_lse=True)
    return out.transpose(1, 2), lse.transpose(1, 2)


def need(package: str, module: str, at_least: str) -> ModuleType:
    """A host's module; what is missing, or how old the host is, comes as a sentence."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != package:
            raise
        try:
            found = f"{package} {importlib.metadata.version(package)} has no {missing.name}"
        except importlib.metadata.PackageNotFoundError:
            found = f"{package} is not installed"
        message = f'{found}; clusterattn.hosts.{package} needs it: pip install "{package}>={at_least}"'
        raise ModuleNotFoundError(message, name=missing.name) from None
