"""A table or a figure of a paper as software: cells of work, rows of results, the paper's number beside ours."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from clusterattn._rows import Row
from clusterattn.methods import Clustered, Method, MethodSpec, Refined
from clusterattn.methods import method as as_method

from ..tasks.files import folder_of

SCALES = ("smoke", "small", "paper")
# Student's t stays within this 95 times in 100, by degrees of freedom from 1; the last serves for more, a bit strictly
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
PAPERS = {
    "clustered": "Fast Transformers with Clustered Attention (Vyas et al. 2020)",
    "smyrf": "SMYRF (Daras et al. 2020), the rebuttal's experiments",
    "clusterformer": "ClusterFormer (Wang et al., ACL 2022)",
}


@dataclass(frozen=True)
class Cell:
    """One piece of work that is done whole or not at all: a trained model, a measurement.

    name        unique in its experiment: "improved-15, length 63, seed 0"
    settings    what sets it apart, JSON-able; it is copied into the cell's rows
    seconds     a guess of its share of the work: short cells are done first
    alone       it measures time: it runs after the others, with nothing beside it
    """

    name: str
    settings: dict[str, Any]
    seconds: float = 1.0
    alone: bool = False


@dataclass(frozen=True)
class Context:
    """Where a cell runs."""

    device: torch.device
    data: Path | None  # the user's folder of data sets
    work: Path  # this cell's own folder, for checkpoints: taken up again after an interruption
    tick: Callable[[str, int, int], object] = lambda text, total, done: None  # words, of how many steps, how many done

    def folder(self, name: str) -> Path:
        """A data set, or a sentence that says what is missing."""
        return folder_of(self.data, name)


@dataclass
class Table:
    """What people read. Cells are text; ``beside`` writes ours next to the paper's."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Experiment(ABC):
    """One table or figure. ``Config`` is a frozen dataclass; ``scales`` says what it is at each scale."""

    name: ClassVar[str]  # "clustered-fig5": the paper's key in PAPERS, then the place
    place: ClassVar[str]  # "Figure 5"
    about: ClassVar[str]  # one line for the list
    needs: ClassVar[tuple[str, ...]] = ()  # data sets, as ``Context.folder`` names them; smoke needs none
    rows_from: ClassVar[str] = ""  # another experiment whose rows this one shows
    cannot: ClassVar[str] = ""  # why it can not be run as published, said in the list
    scales: ClassVar[dict[str, Any]]  # "smoke", "small", "paper" -> Config

    @property
    def paper(self) -> str:
        return PAPERS[self.name.partition("-")[0]]

    def check(self, config: Any, context: Context) -> None:
        """Complain about missing data, before the work."""
        for name in self.needs:
            context.folder(name)

    @abstractmethod
    def cells(self, config: Any) -> list[Cell]:
        """All the work there is, in any order."""

    def shows(self, cell: Cell) -> bool:
        """Is a cell's result among what this experiment shows? Others are for those that take their rows from it."""
        return True

    @abstractmethod
    def run(self, cell: Cell, config: Any, context: Context) -> list[Row]:
        """Do one cell. The runner adds cell.settings, the names and the environment to each row."""

    @abstractmethod
    def tables(self, rows: Sequence[Row], config: Any) -> list[Table]:
        """The paper's numbers beside ours, from whatever rows there are already."""

    def picture(self, rows: Sequence[Row], config: Any) -> bytes | None:
        """A PNG, where people would rather look than read."""
        return None

    @abstractmethod
    def differences(self, config: Any) -> list[str]:
        """A sentence on everything that is not as in the paper: data, size, steps."""

    def findings(self, rows: Sequence[Row], config: Any) -> list[str]:
        """What came out, plainly, also where it contradicts the paper. Computed from the rows."""
        return []


def beside(published: float | str | None, ours: Sequence[float], digits: int = 1, times: float = 1.0) -> str:
    """ "5.6 | 6.1 ± 0.2": the paper's, ours as mean and standard deviation over seeds."""
    theirs = "–" if published is None else published if isinstance(published, str) else f"{published:.{digits}f}"
    return f"{theirs} | {spread(ours, digits, times)}"


def spread(ours: Sequence[float], digits: int = 1, times: float = 1.0) -> str:
    if not ours:
        return "…"
    mean = f"{times * statistics.fmean(ours):.{digits}f}"
    return mean if len(ours) == 1 else f"{mean} ± {times * statistics.stdev(ours):.{digits}f}"


def apart(rows: Sequence[Row], key: str, one: str, other: str, *, times: float = 100, **where: Any) -> list[float]:
    """Differences in points between two methods, repetition by repetition: the same split, the same seed."""
    values = [
        {
            row["seed"]: row[key]
            for row in rows
            if row["method"] == method and key in row and all(row[name] == value for name, value in where.items())
        }
        for method in (one, other)
    ]
    return [times * (values[0][seed] - values[1][seed]) for seed in sorted(values[0]) if seed in values[1]]


def lead(differences: Sequence[float], digits: int = 1, *, less_is_better: bool = False) -> tuple[str, str]:
    """("+1.2 ± 0.4", "ahead"): mean and standard error of the differences between runs that share all else (seed,
    split), and by Student's t at 95 % "ahead", "behind" or "not told apart"; "" for one difference alone."""
    if not differences:
        return "…", ""
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return f"{mean:+.{digits}f}", ""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    within = STUDENT[min(len(differences) - 1, len(STUDENT)) - 1] * error
    verdict = "not told apart" if abs(mean) <= within else "behind" if (mean > 0) == less_is_better else "ahead"
    return f"{mean:+.{digits}f} ± {error:.{digits}f}", verdict


def pinned(spec: MethodSpec) -> Method:
    """A method with the sizes that the experiments mean where theirs are silent, whatever the library would choose from
    the shape of a call: Refined as large as the paper's Improved, with one far part and without a slope, causal blocks
    of 256. What the rows' configurations say stays as it was written."""
    method = as_method(spec)
    if isinstance(method, Refined):
        sizes: dict[str, Any] = {"clusters": 100, "top": 32, "parts": 1, "slope": False, "steps": 5}
        method = replace(method, **{name: size for name, size in sizes.items() if getattr(method, name) is None})
    if isinstance(method, Clustered) and method.block is None:
        method = replace(method, block=256)
    return method


def chosen(rows: Sequence[Row], key: str, **settings: Any) -> list[float]:
    """The values of ``key`` in the rows that match."""
    fit = (row for row in rows if all(row.get(name) == value for name, value in settings.items()))
    return [float(row[key]) for row in fit if row.get(key) is not None]


def as_dict(config: Any) -> dict[str, Any]:
    return asdict(config)
