"""Rows that were measured are shown only where their configuration is that of today: none may be lost by an edit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason='needs the extra "train"')

from clusterattn_papers.reproduce import experiments
from clusterattn_papers.reproduce.runner import fingerprint

RESULTS = Path(__file__).resolve().parents[2] / "results"
KEPT = sorted({path.name.split("_")[0].removeprefix("reproduce-") for path in RESULTS.glob("reproduce-*.jsonl")})


@pytest.mark.skipif(not KEPT, reason="no rows beside the tests: an installed package has none")
@pytest.mark.parametrize("name", KEPT)
def test_rows_have_the_fingerprint_of_today(name: str) -> None:
    """All of the newest file; older files may hold rows of an older configuration."""
    newest = max(RESULTS.glob(f"reproduce-{name}_*.jsonl"), key=lambda path: path.stem.rpartition("_")[2])
    rows = [json.loads(line) for line in newest.read_text(encoding="utf-8").splitlines() if line]
    assert {row["config"] for row in rows} == {fingerprint(experiments()[name], row["scale"]) for row in rows}


@pytest.mark.skipif(not KEPT, reason="no rows beside the tests: an installed package has none")
@pytest.mark.parametrize("name", KEPT)
def test_every_row_is_of_a_cell_that_there_still_is(name: str) -> None:
    experiment = experiments()[name]
    for path in RESULTS.glob(f"reproduce-{name}_*.jsonl"):
        for row in map(json.loads, filter(None, path.read_text(encoding="utf-8").splitlines())):
            if row["config"] == fingerprint(experiment, row["scale"]):
                cells = {cell.name for cell in experiment.cells(experiment.scales[row["scale"]])}
                assert row["cell"] in cells
