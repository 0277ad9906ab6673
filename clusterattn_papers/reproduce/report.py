"""results/ as one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterattn import _rows as files
from clusterattn._errors import bad_value
from clusterattn._files import write_whole
from clusterattn._rows import Row
from clusterattn.measure.report import page

from . import experiments
from ._experiment import PAPERS
from .page import best_scale, cautions, config_of, shown, where
from .runner import THEME

MOST = 200  # rows of a file that are shown; the file has them all


def write_page(results: Path, out: Path, command: str = "") -> Path:
    results = Path(results)
    if not results.is_dir():
        raise bad_value("--results, a folder of .jsonl files", str(results), "`clusterattn reproduce` or `bench` first")
    pictures: dict[str, bytes] = {}
    papers = [
        (title, [_shown(each, results, pictures) for each in experiments().values() if each.paper == title])
        for title in PAPERS.values()
    ]
    others = [_file(path) for path in sorted(results.glob("*.jsonl")) if not path.name.startswith(THEME)]
    facts = {"papers": papers, "others": [each for each in others if each], "command": command}
    return write_whole(out, page("results.html.jinja", pictures, folder=Path(__file__).parent, **facts))


def _shown(experiment: Any, results: Path, pictures: dict[str, bytes]) -> dict[str, Any]:
    """One experiment with what there is of it; its picture is added to the others."""
    head = {
        "name": experiment.name,
        "place": experiment.place,
        "about": experiment.about,
        "cannot": experiment.cannot,
        "needs": experiment.needs,
    }
    found = best_scale(experiment, results)
    if found is None:
        return {**head, "scale": None}
    scale, rows = found
    read, drawn = shown(experiment, scale, rows), experiment.picture(rows, config_of(experiment, scale))
    if drawn:
        pictures[experiment.name] = drawn
    return {
        **head,
        "scale": scale,
        "tables": read.tables,
        "cautions": cautions(experiment, scale, rows),
        "findings": read.findings,
        "differences": read.differences,
        "where": where(rows),
    }


def _file(path: Path) -> dict[str, Any] | None:
    """Any other file of rows: its plain columns, as they are."""
    rows = [_flat(row) for row in files.read(path) if isinstance(row, dict)]
    if not rows:
        return None
    columns = [
        name
        for name in dict.fromkeys(key for row in rows for key in row)
        if not any(isinstance(row.get(name), (dict, list)) for row in rows)
    ]
    varied = [name for name in columns if name == "method" or len({str(row.get(name)) for row in rows}) > 1]
    return {
        "name": path.name,
        "columns": varied,
        "rows": [[_cell(row.get(name)) for name in varied] for row in rows[:MOST]],
        "more": max(len(rows) - MOST, 0),
        "where": where([row for row in rows if "environment" in row]),
    }


def _flat(row: Row) -> Row:
    """Measured numbers that stand together under one name, each in a column of its own."""
    inner = {
        f"{name}: {key}": value
        for name, part in row.items()
        if isinstance(part, dict) and name != "environment" and name != "settings"
        for key, value in part.items()
    }
    return {**row, **inner}


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
