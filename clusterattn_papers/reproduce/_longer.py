"""Cells of Figure 5 that are trained once more and longer, under names of their own: where do their curves end?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterattn._rows import Row

from ._experiment import Cell, Table, beside, chosen, spread
from ._readings import CHOSEN, TASK, TURNS, reading

FP32 = 1.5  # times as long an update, roughly


@dataclass(frozen=True)
class Longer:
    """Methods by name, lengths, and what differs from the training of all others: more updates, and another rate where
    there is one."""

    methods: dict[str, str]
    letters: tuple[int, ...]
    budget: int = 0
    steps: int = 10_000
    seeds: int = 3
    precision: str = "no"
    lr: float | None = None  # None: as all others
    warmup: int = 0
    decay: str = "constant"
    published: float | None = None

    def cells(self, usual: int) -> list[Cell]:
        """``usual``: updates of the other cells."""
        rate = {} if self.lr is None else {"lr": self.lr, "warmup": self.warmup, "decay": self.decay}
        shared: dict[str, Any] = {"most_steps": self.steps, "precision": self.precision, **rate}
        return [
            Cell(
                f"{name}, length {2 * (letters + 1)}, seed {seed}",
                {"method": name, "budget": self.budget, "letters": letters, "seed": seed, "spec": spec, **shared},
                seconds=30 * (1 + letters / 128) * self.steps / usual * (FP32 if self.precision == "no" else 1),
            )
            for letters in self.letters
            for name, spec in self.methods.items()
            for seed in range(self.seeds)
        ]

    def table(self, rows: Sequence[Row]) -> Table:
        table = Table(
            f"{self.words}: masked tokens that are right, per cent (the paper's | ours)",
            [
                "Attention",
                "best weights",
                "in the first half | second",
                f"after {self.steps // 2} updates",
                "first at 99.5 %",
            ],
        )
        for letters in self.letters:
            for name in self.methods:
                mine = [row for row in rows if row["method"] == name and row["letters"] == letters]
                best = beside(self.published, chosen(mine, "accuracy"), 2, 100)
                halves = " | ".join(spread(chosen(mine, f"accuracy_{each}"), 2, 100) for each in ("first", "second"))
                half = [until(row["curve"], self.steps // 2) for row in mine]
                table.rows.append([self._label(name, letters), best, halves, spread(half, 2, 100), first(mine)])
        return table

    @property
    def words(self) -> str:
        where = f"N = {', '.join(str(2 * (letters + 1)) for letters in self.letters)}"
        budget = f" with {self.budget} clusters" if self.budget else ""
        rate = f", {self.decay} from {self.lr:g} after {self.warmup}" if self.lr is not None else ""
        return f"{where}{budget}, {self.precision.replace('no', 'fp32')}, up to {self.steps} updates{rate}"

    def _label(self, name: str, letters: int) -> str:
        return name if len(self.letters) == 1 else f"{name}, N = {2 * (letters + 1)}"


def improved(clusters: int) -> dict[str, str]:
    """As hashed, and with queries grouped as they are: hashing costs distance (`metric`)."""
    hashed = f"improved:clusters={clusters}"
    return {"improved, longer": hashed, "improved, longer, euclid": f"{hashed},metric=euclid"}


# The later reading at every length; and what more updates alone bring to those that stop short without it.
TAUGHT = {f"{TURNS}, longer": reading(TURNS)}
ALONE = {f"{label}, longer": reading(label) for label in (TASK, CHOSEN)}


def until(curve: Sequence[Sequence[float]], step: int) -> float:
    """The best accuracy up to a step; of the first judgement where that came later."""
    return max((accuracy for at, accuracy in curve if at <= step), default=curve[0][1])


def first(rows: Sequence[Row]) -> str:
    """The steps at which rows were first solved."""
    return ", ".join("never" if row["solved"] is None else str(row["solved"]) for row in rows) or "…"
