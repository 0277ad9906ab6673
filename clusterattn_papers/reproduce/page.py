"""What came out, to be read: Markdown and a picture for each experiment, one page for all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from clusterattn._files import write_whole
from clusterattn._rows import Row

from ._experiment import SCALES, Experiment, Table
from .runner import done_rows, source

SMOKE = "Smoke scale: invented data, a few steps. It shows that all runs; its figures mean nothing."

THEIR_WORD = re.compile(r"\blsh\b")  # Clustered attention's, for what its own paper, and we, call Reformer
ONE_NAME = "What the paper calls lsh is called reformer here, as in the library and in every picture."


def config_of(experiment: Experiment, scale: str) -> Any:
    return source(experiment).scales[scale]


@dataclass(frozen=True)
class Wording:
    """What is read of an experiment: a method bears one name in it, whatever its paper calls it."""

    tables: list[Table]
    findings: list[str]
    differences: list[str]


def shown(experiment: Experiment, scale: str, rows: Sequence[Row]) -> Wording:
    config = config_of(experiment, scale)
    tables = experiment.tables(rows, config)
    differences = ([experiment.cannot] if experiment.cannot else []) + experiment.differences(config)
    found = Wording(renamed(tables), renamed(experiment.findings(rows, config)), renamed(differences))
    if found.tables != tables:
        found.differences.append(ONE_NAME)
    return found


def renamed(words: Any) -> Any:
    """Text, and tables and lists of it, with the one name for their word."""
    if isinstance(words, str):
        return THEIR_WORD.sub("reformer", words)
    if isinstance(words, Table):
        return Table(*(renamed(getattr(words, each.name)) for each in fields(words)))
    return [renamed(each) for each in words]


def markdown(experiment: Experiment, scale: str, rows: Sequence[Row], picture: str | None = None) -> str:
    """One experiment as Markdown: tables, what came out, what differs from the paper, where it ran."""
    read = shown(experiment, scale, rows)
    head = f"{experiment.paper}, at scale `{scale}`."
    parts = [f"# {experiment.place}: {experiment.about}", " ".join([head, *cautions(experiment, scale, rows)])]
    parts += [as_markdown(table) for table in read.tables]
    if picture:
        parts.append(f"![{experiment.place}]({picture})")
    for title, lines in (
        ("What came out", read.findings),
        ("What differs from the paper", read.differences),
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
