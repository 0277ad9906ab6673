"""Time and memory against the length: Clustered attention's Figure 4, ClusterFormer's Figures 3 and 4 and Table 7."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterattn_papers.reproduce import Context
from clusterattn_papers.reproduce._curves import legible
from clusterattn_papers.reproduce._pace import measured
from clusterattn_papers.reproduce.clustered_fig4 import LAYER, ClusteredFigure4
from clusterattn_papers.reproduce.clusterformer_timings import MODELS, Figure3, Figure4, Table7

CPU = torch.device("cpu")


def rows_of(experiment: Any, config: Any) -> list[dict[str, Any]]:
    context = Context(CPU, None, Path("unused"))
    cells = experiment.cells(config)
    return [{**cell.settings, **row} for cell in cells for row in experiment.run(cell, config, context)]


def test_every_experiment_runs_for_every_method() -> None:
    made: dict[str, list[dict[str, Any]]] = {}
    for kind in (ClusteredFigure4, Figure3, Figure4, Table7):
        experiment, config = kind(), kind.scales["smoke"]
        assert all(cell.alone for cell in experiment.cells(config))  # a clock runs wrong where others work beside it
        source = experiment.rows_from or experiment.name
        if source not in made:
            made[source] = rows_of(experiment, config)
        rows = made[source]
        assert {row["method"] for row in rows} == set(LAYER if kind is ClusteredFigure4 else MODELS)
        assert all(row["seconds"] > 0 and row["memory_bytes"] > 0 for row in rows)
        tables = experiment.tables(rows, config)
        assert len(tables) >= 2
        for table in tables:
            assert all(len(row) == len(table.columns) and not any("…" in cell for cell in row) for row in table.rows)
        picture = experiment.picture(rows, config)
        assert picture is not None
        assert picture.startswith(b"\x89PNG")
        assert experiment.picture([], config) is None
        assert experiment.tables([], config)
        assert experiment.differences(config)
        experiment.findings(rows, config), experiment.findings([], config)


def test_time_and_memory_are_those_of_a_step() -> None:
    def make() -> Any:
        def step() -> None:
            time.sleep(0.01)
            torch.zeros(1000, 1000)

        return step

    found = measured(make, CPU, 0.05)
    assert 0.01 <= found["seconds"] < 0.1
    assert found["timed"] >= 2
    assert found["memory_bytes"] == pytest.approx(4e6, rel=0.01)


def test_out_of_memory_is_a_result_and_other_errors_are_not() -> None:
    def fails(error: Exception) -> Any:
        def step() -> None:
            raise error

        return lambda: step

    assert "failed" in measured(fails(torch.OutOfMemoryError("CUDA out of memory. Tried …")), CPU, 0.0)
    assert "failed" in measured(fails(RuntimeError("DefaultCPUAllocator: can't allocate memory: …")), CPU, 0.0)
    with pytest.raises(RuntimeError, match="a mistake"):
        measured(fails(RuntimeError("a mistake")), CPU, 0.0)
    config = Table7.scales["small"]
    row = {"method": "transformer (written out)", "n": 10_000, "pass": "training", "batch": 2, "failed": "OutOfMemory"}
    memory, seconds = Table7().tables([row], config)
    assert memory.rows[0][1:6] == ["3271 | …", "7663 | …", "15519 | …", "– | –", "– | …"]
    assert seconds.rows[0][4] == "– | –"
    assert "10 000" in Table7().findings([row], config)[0]


def test_only_the_written_out_transformer_holds_its_matrix() -> None:
    both = ("full (written out)", "full (SDPA)")
    config = replace(ClusteredFigure4.scales["smoke"], lengths=(256, 512), methods=both, tokens=512)
    held = {(row["method"], row["n"]): row["memory_bytes"] for row in rows_of(ClusteredFigure4(), config)}
    assert held["full (written out)", 512] > 1.5 * held["full (written out)", 256]  # two of 256 against one of 512
    assert held["full (SDPA)", 512] < 1.2 * held["full (SDPA)", 256]


def test_what_is_saved_stands_beside_the_papers() -> None:
    config = Figure3.scales["small"]
    found = (("transformer (written out)", 0.2, 4e9), ("clusterformer", 0.05, 1e9))
    rows = [
        {"method": method, "n": 2000, "pass": which, "batch": 20, "seconds": seconds, "memory_bytes": memory}
        for which in Figure3.passes
        for method, seconds, memory in found
    ]
    saved = {row[0]: row[1:] for row in Figure3().tables(rows, config)[-1].rows}
    assert saved["clusterformer"] == ["51.4 | 75.0", "– | 75.0"]
    assert saved["routing"][0] == "41.8 | …"
    memory = Figure4().tables(rows, config)
    assert {row[0]: row[1] for row in memory[-1].rows}["clusterformer"] == "53.8 | 75.0"
    assert memory[0].rows[0][-1] == "3815"  # MiB
    assert "clusterformer from 2 000 words" in Figure3().findings(rows, config)[0]
    assert Figure4().findings(rows, config) == []  # SDPA, of which the paper says nothing, is not among them
    rows += [{**row, "method": "transformer (SDPA)", "memory_bytes": 5e8} for row in rows[::2]]
    told = "at 2 000 words, times the memory of transformer (SDPA): clusterformer 2.00."
    assert Figure4().findings(rows, config) == [f"Training {told}", f"Inference {told}"]


def test_lengths_are_the_papers() -> None:
    assert ClusteredFigure4.scales["small"].lengths == (512, 1024, 2048, 4096, 8192, 16384, 32768)
    assert Table7.scales["small"].lengths[-3:] == (55_000, 100_000, 200_000)
    assert Table7.scales["small"].batch == 2
    assert Figure3.scales["small"].lengths[-1] == 2000
    assert Figure3.scales["small"].batch == 20


def test_names_on_an_axis_do_not_stand_on_each_other() -> None:
    assert legible([35_000, 45_000, 55_000, 100_000]) == ["35 000", "", "55 000", "100 000"]
