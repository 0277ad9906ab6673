"""Run docs/first-steps.ipynb and keep what its cells print and draw: `make notebook`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from clusterattn._files import write_whole

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "docs" / "first-steps.ipynb"
SECONDS = 300  # for one cell, on a machine that has other work


def run(path: Path = NOTEBOOK) -> Any:
    """The notebook after every cell has run; a cell that raises is an error here."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=SECONDS, record_timing=False, resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """What is printed in pieces as one piece."""
    joined: list[Any] = []
    for each in outputs:
        if joined and each.output_type == joined[-1].output_type == "stream" and each.name == joined[-1].name:
            joined[-1].text += each.text
        else:
            joined.append(each)
    return joined


if __name__ == "__main__":
    write_whole(NOTEBOOK, nbformat.writes(run()) + "\n")
