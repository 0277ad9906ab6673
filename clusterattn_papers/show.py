"""What the papers' commands print: tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterattn._extras import need
from clusterattn.measure.show import console, literal, show_written
from clusterattn.measure.words import counted

if TYPE_CHECKING:
    from clusterattn._rows import Row
    from clusterattn.methods import Method

    from .clusters import ClusterReport
    from .reproduce import Experiment
    from .tasks import Task
    from .train import Fitted

MOST_LABELS = 20  # that are listed


@dataclass(frozen=True)
class Run:
    """A training that is over: figures by split, and the files of the model."""

    method: Method
    fitted: Fitted
    judged: Mapping[str, Mapping[str, float]]  # what was held out from everything: "test", where there is one
    written: Sequence[Path]

    def splits(self) -> dict[str, Mapping[str, float]]:
        return {"dev": self.fitted.best, **self.judged}

    def figures(self) -> dict[str, Any]:
        return {**self.splits(), "steps": self.fitted.steps, "seconds": self.fitted.seconds}


def show_examples(task: Task) -> None:
    """What there is to learn from: how many examples, and of which label."""
    from .tasks.text import Labelled

    rich = console()
    sizes = ", ".join(f"{len(each)} {split}" for split, each in task.splits.items())
    rich.print(f"examples: {sizes}", highlight=False)
    if isinstance(task, Labelled):
        counts = task.counts()
        more = f", … ({len(counts)} in all)" if len(counts) > MOST_LABELS else ""
        listed = ", ".join(f"{label} {count}" for label, count in list(counts.items())[:MOST_LABELS])
        rich.print(f"labels: {literal(listed)}{more}", highlight=False)


def show_trained(task: Task, runs: Sequence[Run]) -> None:
    """Figures by split, each method's under the other's; what took how long; whether anything was learnt."""
    rich, table = console(), need("rich.table").Table(box=need("rich.box").SIMPLE_HEAD)
    for title in ("split", "method"):
        table.add_column(title)
    for title in runs[0].fitted.best:
        table.add_column(title, justify="right")
    for split in runs[0].splits():
        for run in runs:
            shown = run.splits()[split]
            table.add_row(split, literal(str(run.method)), *(f"{shown[title]:.4g}" for title in run.fitted.best))
    rich.print(table)
    for run in runs:
        took = f"{counted(run.fitted.steps, 'update')} in {run.fitted.seconds:.0f} s"
        rich.print(f"{literal(str(run.method))}: {took}", highlight=False)
    for run in runs:
        if sentence := no_better(task, run):
            rich.print(f"[yellow]{literal(sentence)}[/]", highlight=False)
    show_written([path for run in runs for path in run.written])


def no_better(task: Task, run: Run) -> str:
    """A sentence where a model does no better than one that always gives the commonest label; else ""."""
    from .tasks.text import Labelled

    if not isinstance(task, Labelled) or task.figure != "accuracy":
        return ""
    split, figures = list(run.splits().items())[-1]
    label, share = task.majority(split)
    if figures["accuracy"] > share:
        return ""
    return (
        f"{run.method} is no better than always answering {label!r}, which is right in {share:.1%} of {split}: "
        "more examples, more epochs or another learning rate (--lr) may help"
    )


def show_experiments(found: Mapping[str, Experiment]) -> None:
    rich = console()
    for paper in dict.fromkeys(each.paper for each in found.values()):
        table = _titled(paper)
        for title in ("name", "place", "what", "data"):
            table.add_column(title, no_wrap=title in ("name", "place"))
        for each in (each for each in found.values() if each.paper == paper):
            about = literal(each.about) + (f"\n[yellow]{literal(each.cannot)}[/]" if each.cannot else "")
            table.add_row(each.name, each.place, about, ", ".join(each.needs) or "generated")
        rich.print(table)


def show_missing(found: Mapping[str, tuple[Sequence[str], int]], names: bool) -> None:
    """How many cells of each experiment have no rows; the names of the cells too, where they are asked for."""
    rich, table = console(), _titled("Cells without rows")
    for title in ("name", "missing", "of"):
        table.add_column(title, justify="left" if title == "name" else "right")
    for name, (cells, count) in found.items():
        if cells:
            table.add_row(name, str(len(cells)), str(count))
    rich.print(table if table.row_count else "every cell has rows")
    for name, (cells, _) in found.items() if names else ():
        for cell in cells:
            rich.print(literal(f"{name}: {cell}"), highlight=False)


def show_reproduced(experiment: Experiment, scale: str, rows: Sequence[Row], written: Sequence[Path]) -> None:
    from .reproduce.page import cautions, shown

    rich, read = console(), shown(experiment, scale, rows)
    for line in cautions(experiment, scale, rows):
        rich.print(f"[yellow]{literal(line)}[/]", highlight=False)
    for each in read.tables:
        table = _titled(each.title)
        for at, title in enumerate(each.columns):
            table.add_column(literal(title), justify="right" if at else "left")
        for row in each.rows:
            table.add_row(*map(literal, row))
        rich.print(table)
        for note in each.notes:
            rich.print(f"[dim]{literal(note)}[/]", highlight=False)
    rich.print("[dim]the paper | ours[/]")
    for line in read.findings:
        rich.print(f"• {literal(line)}", highlight=False)
    for line in read.differences:
        rich.print(f"[dim]• {literal(line)}[/]", highlight=False)
    show_written(written)


def show_clusters(report: ClusterReport, written: Sequence[Path]) -> None:
    """A line for every layer, and the answers."""
    from .clusters_page import by_layer

    rich, table = console(), _titled("Clusters by layer, means over heads")
    columns, rows = by_layer(report)
    for at, title in enumerate(columns):
        table.add_column(literal(title), justify="right" if at else "left")
    for row in rows:
        table.add_row(*map(literal, row))
    rich.print(table)
    for name in report.left_out:
        why = "which has other positions than the first layer"
        rich.print(f"[dim]not shown: {literal(name)}, {why}[/]", highlight=False)
    for line in report.findings():
        rich.print(f"• {literal(line)}", highlight=False)
    show_written(written)


def _titled(title: str) -> Any:
    return need("rich.table").Table(title=literal(title), title_justify="left", box=need("rich.box").SIMPLE_HEAD)
