"""Time and memory of a step against the length: what the papers' experiments on them share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from clusterattn._rows import Row

from ._curves import Curves, spaced
from ._experiment import Cell, Context, Experiment, Table
from ._pace import Step, measured
from ._readings import DEFAULT, PAPERS

REPLAYED = "on a GPU replayed as CUDA graphs, so without what Python takes to launch kernels"
TIMED_LATER = (DEFAULT,)  # what `ClusterFormer()` is


@dataclass(frozen=True)
class TimingsConfig:
    lengths: tuple[int, ...]
    methods: tuple[str, ...]
    batch: int = 0  # 0: as many sequences as make ``tokens``
    tokens: int = 32768
    heads: int = 6
    dim: int = 384
    feedforward: int = 1536
    layers: int = 1
    seconds: float = 0.15  # for each measurement, at least one call after the warm-up
    precision: str = "no"  # or "bf16", by autocast

    @property
    def labels(self) -> tuple[str, ...]:
        """The methods, and behind ClusterFormer's first reading the later ones that are timed."""
        readings = (PAPERS, *TIMED_LATER)
        return tuple(each for label in self.methods for each in (readings if label == PAPERS else (label,)))


def _kernel(label: str) -> Any:
    return sdpa_kernel(SDPBackend.MATH) if "written out" in label else contextlib.nullcontext()


class Timing(Experiment):
    """Cells that measure time: one after the other, nothing beside them."""

    def cells(self, config: TimingsConfig) -> list[Cell]:
        return [
            Cell(f"{method}, {n} tokens", {"method": method, "n": n}, alone=True)
            for n in config.lengths
            for method in config.labels
        ]

    def run(self, cell: Cell, config: TimingsConfig, context: Context) -> list[Row]:
        label, n = cell.settings["method"], cell.settings["n"]
        rows: list[Row] = []
        for which in self.passes:
            context.tick(which, len(self.passes), len(rows))

            def make(which: str = which) -> Step:
                torch.manual_seed(0)
                return self.step(label, n, config, context.device, which == "training")

            with _kernel(label):
                answer = measured(make, context.device, config.seconds)
            rows.append({"pass": which, "batch": batch_of(config, n), **answer})
        return rows

    passes: ClassVar[tuple[str, ...]] = ("training",)

    def step(self, label: str, n: int, config: TimingsConfig, device: torch.device, training: bool) -> Step:
        raise NotImplementedError

    def _units(self, row: Row | None, key: str, unit: float) -> float | None:
        return None if row is None or row.get("failed") or not row.get(key) else float(row[key]) * unit

    def _table(
        self,
        title: str,
        rows: Sequence[Row],
        config: TimingsConfig,
        which: str,
        cell: Callable[[str, int, Row | None], str],
    ) -> Table:
        table = Table(title, ["Attention", *(spaced(n) for n in config.lengths)])
        for label in config.labels:
            table.rows.append([label, *(cell(label, n, one(rows, label, n, which)) for n in config.lengths)])
        return table


def one(rows: Sequence[Row], label: str, n: int, which: str) -> Row | None:
    return next((row for row in rows if (row["method"], row["n"], row["pass"]) == (label, n, which)), None)


def curves(rows: Sequence[Row], config: TimingsConfig, which: str, height: Callable[[Row], float], key: str) -> Curves:
    found = {}
    for label in config.labels:
        mine = [row for n in config.lengths if (row := one(rows, label, n, which)) and row.get(key)]
        if mine:
            found[label] = [row["n"] for row in mine], [height(row) for row in mine]
    return found


def batch_of(config: TimingsConfig, n: int) -> int:
    return config.batch or max(config.tokens // n, 1)


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ahead_from(
    rows: Sequence[Row], config: TimingsConfig, label: str, other: str, which: str = "training"
) -> int | None:
    """The least length from which on a method is faster wherever both ran; 0: never; None: nothing to compare."""
    pairs = [(n, one(rows, label, n, which), one(rows, other, n, which)) for n in config.lengths]
    faster = {
        n: "failed" in theirs or ours["seconds"] < theirs["seconds"]
        for n, ours, theirs in pairs
        if ours and theirs and "failed" not in ours
    }
    if not faster:
        return None
    slow = [n for n, yes in faster.items() if not yes]
    after = [n for n in faster if not slow or n > slow[-1]]
    return after[0] if after else 0


def against(
    rows: Sequence[Row], n: int, labels: Sequence[str], peer: str, key: str = "seconds", which: str = "training"
) -> dict[str, float]:
    """How many times the peer's seconds or bytes each takes, where both were measured; the least first."""
    taken = {
        label: float(row[key]) for label in (*labels, peer) if (row := one(rows, label, n, which)) and row.get(key)
    }
    mine = sorted((label for label in labels if label in taken), key=taken.__getitem__)
    return {label: taken[label] / taken[peer] for label in mine} if peer in taken else {}


def sizes_note(config: TimingsConfig, paper: tuple[int, int, int]) -> list[str]:
    ours = (config.layers, config.dim, config.heads)
    if ours == paper:
        return []
    return ["{} layer(s) of width {} with {} heads; the paper has {}, {} and {}.".format(*ours, *paper)]
