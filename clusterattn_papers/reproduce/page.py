"""What came out, to be read: Markdown and a picture for each experiment, one page for all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterattn._files import write_whole
from clusterattn._rows import Row

from ._experiment import SCALES, Experiment, Table
from .runner import done_rows, source

SMOKE = "Smoke scale: invented data, a few steps. It shows that all runs; its figures mean nothing."


def config_of(experiment: Experiment, scale: str) -> Any:
    return source(experiment).scales[scale]


def markdown(experiment: Experiment, scale: str, rows: Sequence[Row], picture: str | None = None) -> str:
    """One experiment as Markdown: tables, what came out, what differs from the paper, where it ran."""
    config = config_of(experiment, scale)
    head = f"{experiment.paper}, at scale `{scale}`."
    parts = [f"# {experiment.place}: {experiment.about}", " ".join([head, *cautions(experiment, scale, rows)])]
    parts += [as_markdown(table) for table in experiment.tables(rows, config)]
    if picture:
        parts.append(f"![{experiment.place}]({picture})")
    for title, lines in (
        ("What came out", experiment.findings(rows, config)),
        ("What differs from the paper", differences(experiment, scale)),
    ):
        if lines:
            parts.append(f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines))
    parts.append(f"<sub>{where(rows)}</sub>")
    return "\n\n".join(parts) + "\n"


def cautions(experiment: Experiment, scale: str, rows: Sequence[Row]) -> list[str]:
    """What must be read before any figure: that it means nothing, or that some are still to come."""
    return [SMOKE] * (scale == "smoke") + unfinished(experiment, scale, rows)


def unfinished(experiment: Experiment, scale: str, rows: Sequence[Row]) -> list[str]:
    """Said wherever rows are shown of which some are still to come."""
    made = source(experiment).cells(config_of(experiment, scale))
    wanted = [cell.name for cell in made if experiment.shows(cell)]
    done = {row["cell"] for row in rows} & set(wanted)
    return [f"{len(done)} of {len(wanted)} cells are done; … stands for the others."] if len(done) < len(wanted) else []


def differences(experiment: Experiment, scale: str) -> list[str]:
    return ([experiment.cannot] if experiment.cannot else []) + experiment.differences(config_of(experiment, scale))


def as_markdown(table: Table) -> str:
    lines = [f"**{table.title}**", "", _line(table.columns), _line(["---", *["---:"] * (len(table.columns) - 1)])]
    lines += [_line(row) for row in table.rows]
    return "\n".join(lines + [f"\n{note}" for note in table.notes])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def where(rows: Sequence[Row]) -> str:
    """Hardware, versions, commits and dates of the rows."""
    met: dict[str, list[str]] = {"hardware": [], "torch": [], "commit": [], "date": []}
    for row in rows:
        for name, seen in met.items():
            value = str(row["environment"].get(name))[: 10 if name == "date" else None]
            if value not in seen:
                seen.append(value)
    return "; ".join(f"{name} {', '.join(seen)}" for name, seen in met.items() if seen) or "no rows yet"


def write(experiment: Experiment, scale: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Markdown and picture into a folder."""
    stem = f"{experiment.name}-{scale}"
    drawn = experiment.picture(rows, config_of(experiment, scale)) if rows else None
    picture = folder / f"{stem}.png"
    text = write_whole(folder / f"{stem}.md", markdown(experiment, scale, rows, picture.name if drawn else None))
    if not drawn:
        picture.unlink(missing_ok=True)  # of rows that are no longer there
        return [text]
    return [text, write_whole(picture, drawn)]


def best_scale(experiment: Experiment, results: Path) -> tuple[str, list[Row]] | None:
    """The largest scale of which there are rows."""
    for scale in reversed(SCALES):
        rows = done_rows(experiment, scale, results)
        if rows:
            return scale, rows
    return None
