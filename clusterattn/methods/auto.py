"""Exact attention where it is faster on this device, Refined where it is not."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from .._errors import bad_value
from .._types import Call, Clusters, Groups, Method
from . import budgets
from .budgets import Shape, constant
from .exact import Exact
from .refined import Refined

SHIPPED = Path(__file__).resolve().parent.parent / "data" / "crossings.json"
GAIN = 0.9  # Refined must take at most so much of exact attention's time: what is predicted is not quite what comes
PASSES = ("forward", "forward+backward")


@dataclass(frozen=True, kw_only=True)
class Auto(Method):
    """``Exact`` or ``Refined(budget=…)``, whichever is faster here: the default of ``ca.attention``.

    The choice follows from the device, the dtype and the shapes of a call, never from its content nor from whether
    gradients are wanted: Refined is taken where it wins both forward and with backward. Times are predicted from a few
    constants of each device, ``clusterattn/data/crossings.json``; ``clusterattn calibrate`` measures those of this
    machine and keeps them in the user's cache folder. A device without constants gets exact attention.

    Args:
        budget: of Refined, see there
    """

    name: ClassVar[str] = "auto"
    causality: ClassVar[str] = "strict"
    groups_type: ClassVar[type | None] = Clusters

    budget: float | None = None

    def __post_init__(self) -> None:
        Refined(budget=self.budget)

    def choose(self, device: torch.device, dtype: torch.dtype, rows: int, shape: Shape) -> Method:
        """For a call of so many rows (b h): Exact, or Refined with its sizes.

        Args:
            device: where the call runs
            dtype: of q, k and v
            rows: batch times query heads
            shape: of the call
        """
        at = budgets.stepped(shape)
        plain = (device.type, device.index or 0, str(dtype), _threads(), budgets.step(rows), self.budget)
        if not _refined_wins(plain, at.n, at.m, at.d, at.e, at.causal, at.group):
            return Exact()
        return self.refined(shape)

    def refined(self, shape: Shape) -> Refined:
        """Refined for a call of this shape, inside the budget.

        Args:
            shape: of the call
        """
        n, m, d, e = shape.n, shape.m, shape.d, shape.e
        return Refined(budget=self.budget).at(n, m, d, e, causal=shape.causal, group=shape.group)

    def group(self, q: torch.Tensor, k: torch.Tensor, call: Call) -> tuple[Groups, Any]:
        raise AssertionError("attention() calls the method that `choose` names")

    def cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        """Of its choice on torch's default device, for one row."""
        shape = Shape(n, m, d, e, causal, group)
        chosen = self.choose(torch.get_default_device(), torch.get_default_dtype(), 1, shape)
        return chosen.cost(n, m, d, e, causal=causal, group=group)


@constant
def _threads() -> int:
    return torch.get_num_threads()


@constant
def _refined_wins(plain: tuple[Any, ...], *shape: Any) -> bool:
    return _predicted(plain, shape)


@lru_cache(maxsize=4096)
def _predicted(plain: tuple[Any, ...], shape: tuple[Any, ...]) -> bool:
    kind, index, dtype, threads, rows, budget = plain
    constants = crossing(torch.device(kind, index) if kind != "cpu" else torch.device(kind), dtype, threads, shape[4])
    if constants is None or min(shape[:2]) < 1:
        return False
    n, m, d, e, causal, group = shape
    methods = Exact(), Refined(budget=budget)
    work = {each.name: each.cost(n, m, d, e, causal=causal, group=group) for each in methods}

    def seconds(which: str, name: str) -> float:
        call, row, rate = constants[which][name]
        return float(call + rows * (row + work[name] / rate))

    return all(seconds(each, "refined") <= GAIN * seconds(each, "exact") for each in PASSES)


# ---------------------------------------------------------------------------------------------------- the data


def crossing(device: torch.device, dtype: str, threads: int, causal: bool) -> dict[str, Any] | None:
    """The constants of a device: pass -> method -> (seconds of a call, of each row (b h), multiply-adds in a second).
    This machine's own where they were measured, else those that the package brings for it, else those of its kind."""
    names = (place(device, threads), device.type)
    wanted = dtype.removeprefix("torch.")
    for name in names:
        for entry in (*_entries(_user_file()), *_entries(SHIPPED)):
            if entry["device"] == name and wanted in entry["dtypes"] and entry["causal"] == causal:
                return dict(entry["passes"])
    return None


def place(device: torch.device, threads: int) -> str:
    """A device in one word: for a CPU, with its threads."""
    from .._rows import hardware

    name = hardware(device).lower().replace(" ", "-")
    return f"{name}, {threads} threads" if device.type == "cpu" else name


def keep(entries: list[dict[str, Any]]) -> Path:
    """Store what was measured on this machine, in place of what was stored for the same device, dtype and causality."""
    from .._files import write_whole

    def key(entry: dict[str, Any]) -> tuple[Any, ...]:
        return entry["device"], tuple(entry["dtypes"]), entry["causal"]

    new = {key(entry) for entry in entries}
    kept = [entry for entry in _entries(_user_file()) if key(entry) not in new]
    path = write_whole(_user_file(), json.dumps({"version": 1, "entries": kept + entries}, indent=1) + "\n")
    _entries.cache_clear()
    _predicted.cache_clear()
    _kept.append(path)
    return path


_kept: list[Path] = []


def times_kept() -> int:
    """How often constants were stored in this process: a choice made before may not be today's."""
    return len(_kept)


@lru_cache(maxsize=8)
def _entries(path: Path) -> tuple[dict[str, Any], ...]:
    if not path.is_file():
        return ()
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        return tuple(read["entries"])
    except (ValueError, KeyError, TypeError):
        raise bad_value("the crossings of this machine as JSON", f"{path}, which is none", "removing it") from None


def _user_file() -> Path:
    """In the folder where this system keeps what can be made again."""
    if sys.platform == "win32":
        home = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        home = str(Path.home() / "Library" / "Caches")
    else:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "clusterattn" / "crossings.json"
