"""What the papers' commands print: tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterattn._extras import need
from clusterattn.measure.show import console, literal, show_written

if TYPE_CHECKING:
    from clusterattn._rows import Row

    from .reproduce import Experiment
    from .tasks import Task
    from .train import Fitted


def show_trained(
    task: Task, fitted: Fitted, figures: Mapping[str, Mapping[str, float]], written: Sequence[Path]
) -> None:
    rich, table = console(), need("rich.table").Table(box=need("rich.box").SIMPLE_HEAD)
    table.add_column("split")
    for title in fitted.best:
        table.add_column(title, justify="right")
    for split, shown in {"dev": fitted.best, **figures}.items():
        table.add_row(split, *(f"{shown[title]:.4g}" for title in fitted.best))
    rich.print(table)
    counts = ", ".join(f"{len(each)} {split}" for split, each in task.splits.items())
    labels: Sequence[str] = getattr(task, "labels", ())
    if labels:
        more = " …" if len(labels) > 20 else ""
        rich.print(f"labels: {literal(', '.join(map(str, labels[:20])))}{more}", highlight=False)
    rich.print(f"{counts} examples; {fitted.steps} updates in {fitted.seconds:.0f} s", highlight=False)
    show_written(written)


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


def show_reproduced(experiment: Experiment, scale: str, rows: Sequence[Row], written: Sequence[Path]) -> None:
    from .reproduce.page import config_of, differences

    rich, config = console(), config_of(experiment, scale)
    for each in experiment.tables(rows, config):
        table = _titled(each.title)
        for at, title in enumerate(each.columns):
            table.add_column(literal(title), justify="right" if at else "left")
        for row in each.rows:
            table.add_row(*map(literal, row))
        rich.print(table)
        for note in each.notes:
            rich.print(f"[dim]{literal(note)}[/]", highlight=False)
    rich.print("[dim]the paper | ours[/]")
    for line in experiment.findings(rows, config):
        rich.print(f"• {literal(line)}", highlight=False)
    for line in differences(experiment, scale):
        rich.print(f"[dim]• {literal(line)}[/]", highlight=False)
    show_written(written)


def _titled(title: str) -> Any:
    return need("rich.table").Table(title=literal(title), title_justify="left", box=need("rich.box").SIMPLE_HEAD)
