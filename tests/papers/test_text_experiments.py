"""The experiments on texts at their smallest: cells, tables and verdicts from rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("safetensors")

from reviews import reviews

from clusterattn_papers.reproduce import _texts, clusterformer_settings, clusterformer_text
from clusterattn_papers.reproduce._experiment import Context, apart, lead
from clusterattn_papers.reproduce._groupings import groupings
from clusterattn_papers.reproduce._readings import GROUPED, NEW, READINGS, best_on_dev
from clusterattn_papers.reproduce._texts import against_paper, best_reading, compared, task_losses, trained
from clusterattn_papers.reproduce.clusterformer_settings import ClusterFormerTable4
from clusterattn_papers.reproduce.clusterformer_text import ClusterFormerFig5, ClusterFormerTable3
from clusterattn_papers.tasks.text import Classify
from clusterattn_papers.train import Fitted, Settings

EXPERIMENTS = clusterformer_text.EXPERIMENTS + clusterformer_settings.EXPERIMENTS


def smoke(experiment: Any, folder: Path) -> list[dict[str, Any]]:
    config = experiment.scales["smoke"]
    context = Context(torch.device("cpu"), None, folder)
    return [
        {**cell.settings, **row}
        for at, cell in enumerate(experiment.cells(config))
        for row in experiment.run(cell, config, Context(context.device, None, folder / str(at)))
    ]


@pytest.mark.parametrize("kind", [each for each in EXPERIMENTS if not each.rows_from])
def test_every_experiment_runs_at_smoke_scale(kind: Any, tmp_path: Path) -> None:
    experiment = kind()
    config = experiment.scales["smoke"]
    rows = smoke(experiment, tmp_path)
    assert rows
    assert all(len(json.dumps(row)) < 4000 for row in rows)
    for table in experiment.tables(rows, config):
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert not any(
            "…" in cell
            for row in table.rows
            for name, cell in zip(table.columns, row, strict=True)
            if not name.startswith("memory")
        )  # of a GPU
    assert experiment.findings(rows, config)
    assert experiment.findings([], config) == []
    assert experiment.tables([], config)
    assert experiment.differences(config)
    if isinstance(experiment, ClusterFormerTable3):
        shown = ClusterFormerFig5()
        drawn = shown.picture(rows, config)
        assert drawn is not None
        assert drawn.startswith(b"\x89PNG")
        assert len(shown.tables(rows, config)[0].rows) == 4 + len(NEW)
        assert shown.findings(rows, config)


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_cells_have_names_of_their_own(kind: Any) -> None:
    for scale in ("smoke", "small", "paper"):
        names = [cell.name for cell in kind().cells(kind.scales[scale])]
        assert len(names) == len(set(names)) > 0


def test_curves_show_the_tasks_own_loss() -> None:
    history = [{"step": 2, "loss": 1.0}, {"step": 4, "loss": 2.0}]
    added = [torch.tensor(each) for each in (-0.5, -0.5, 0.0, 0.5)]
    assert task_losses(history, 4, added) == [1.5, 1.75]
    assert task_losses(history, 4, added[2:]) == [None, 1.75]  # what was added before a restart is not known


def test_a_small_set_is_trained_long_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[Settings] = []

    def noted(task: Any, model: Any, settings: Settings, **_: Any) -> Fitted:
        told.append(settings)
        history = [{"step": at, "epoch": at, "seconds": 9.0 + at, "loss": 1.0, "accuracy": 0.5} for at in range(1, 5)]
        return Fitted(model, {"accuracy": 0.5}, 0, 13.0, 4.0, history)

    monkeypatch.setattr(_texts, "fit", noted)
    monkeypatch.setattr(_texts, "task_losses", lambda history, *_: [None] * len(history))
    context = Context(torch.device("cpu"), None, tmp_path)
    long, short = _texts.TextConfig(sets=(), epochs=10, dim=16), ClusterFormerTable4.scales["small"]
    for config, rows in ((long, reviews(60)), (long, reviews(6400)), (short, reviews(6400))):
        trained(Classify({"train": rows, "test": rows[:2]}), "exact", config, 0, context)
    first, second, third = told
    assert (first.batch, first.epochs, first.patience, first.warmup) == (3, 40, None, 20)
    assert (second.batch, second.epochs, second.patience, second.warmup) == (64, 10, 2, 50)
    assert third.judge_batch == third.batch < second.judge_batch


def test_a_lead_is_one_at_95_per_cent() -> None:
    assert lead([1.0, 3.0, 2.0]) == ("+2.0 ± 0.6", "not told apart")
    assert lead([2.0, 4.0, 3.0]) == ("+3.0 ± 0.6", "ahead")
    assert lead([-0.2, -0.4, -0.3], digits=2) == ("-0.30 ± 0.06", "behind")
    assert lead([1.0] * 40 + [-1.0] * 20) == ("+0.3 ± 0.1", "ahead")
    assert lead([2.0, 4.0, 3.0], less_is_better=True) == ("+3.0 ± 0.6", "behind")
    assert lead([-2.0, -4.0, -3.0], less_is_better=True) == ("-3.0 ± 0.6", "ahead")
    assert lead([2.0]) == ("+2.0", "")
    assert lead([0.0, 0.0]) == ("+0.0 ± 0.0", "not told apart")
    assert lead([]) == ("…", "")
    assert against_paper("behind", -1.0) == "behind, as in the paper"
    assert against_paper("behind", 1.0) == "behind, against the paper"


def test_differences_are_taken_seed_by_seed() -> None:
    rows = [
        {"set": "CR", "method": method, "seed": seed, "accuracy": value}
        for method, seed, value in (("a", 0, 0.9), ("a", 1, 0.7), ("a", 2, 0.5), ("b", 0, 0.8), ("b", 1, 0.8))
    ]
    assert apart(rows, "accuracy", "a", "b", set="CR") == pytest.approx([10, -10])


def test_readings_are_chosen_on_dev_and_judged_on_test() -> None:
    rows = [
        {"set": "CR", "method": method, "seed": seed, "dev": dev + seed / 100, "accuracy": accuracy}
        for method, dev, accuracy in (
            ("transformer", 0.9, 0.8),
            ("clusterformer", 0.7, 0.9),
            ("clusterformer-off", 0.8, 0.7),
        )
        for seed in range(2)
    ]
    columns = [("CR", "CR", "accuracy"), ("MR", "MR", "accuracy")]
    assert best_on_dev(rows, "dev", set="CR") == "clusterformer-off"
    said = best_reading(rows, columns)
    assert said is not None
    name = f"ClusterFormer, {GROUPED['clusterformer-off']}"
    assert f"CR {name} (-10.0 ± 0.0 from the Transformer on test, behind)" in said
    assert "MR" not in said
    assert best_reading([row for row in rows if row["method"] != "clusterformer"], columns) is None


def test_table_4_stands_beside_the_papers_for_the_clusters_that_were_run() -> None:
    table, config = ClusterFormerTable4(), ClusterFormerTable4.scales["small"]
    rows = [
        {"clusters": k, "accuracy": accuracy, "seconds": seconds, "memory_mib": None}
        for k, accuracy, seconds in ((0, 0.8, 2.0), (5, 0.81, 4.0), (20, 0.77, 3.0))
    ]
    assert table.findings(rows, config) == [
        "ClusterFormer (one grouping for all heads) against SDPA, points of accuracy: +1.0 with k = 5, -3.0 with "
        "k = 20 (paper: +0.2 with k = 20, +0.1 with k = 5).",
        "ClusterFormer (one grouping for all heads) against SDPA, times the time: 1.50 to 2.00 (paper: 0.58 to 0.75).",
    ]
    assert table.findings(rows[1:], config) == []
    shown = {row[0] for row in table.tables(rows, config)[0].rows}
    assert {f"k = 5, {GROUPED[label]}" for label in READINGS} < shown  # every reading has cells, done or not


def test_pages_show_what_became_of_the_groupings() -> None:
    def row(method: str, **more: Any) -> dict[str, Any]:
        return {"method": method, "spec": "clusterformer:clusters=3", **more}

    def found(*points: float) -> dict[str, list[float]]:
        return {"points": [*points], "centroids": [1.0, 1.0], "used": [2.8, 2.9], "largest": [0.4, 0.45]}

    rows = [row("a", groupings=found(0.1, 0.2)), row("a", history=[{"step": 1}, {"groupings": found(0.3, 0.15)}])]
    [table] = groupings({"first": rows, "untold": [row("b"), row("c", history=[[1, 0.5]])]})
    assert table.rows == [["first", "0.10 to 0.30", "1.00", "2.8 to 2.9 of 3", "40 to 45"]]
    assert groupings({"untold": [row("b")]}) == []


def test_one_repetition_claims_no_error_and_no_verdict() -> None:
    def rows(*gaps: float) -> list[dict[str, Any]]:
        both = [("clusterformer", seed, 0.8 + gap) for seed, gap in enumerate(gaps)]
        both += [("transformer", seed, 0.8) for seed in range(len(gaps))]
        return [{"set": "CR", "method": method, "seed": seed, "accuracy": value} for method, seed, value in both]

    def told(*gaps: float) -> str:
        published = {"clusterformer": {"CR": 88.1}, "transformer": {"CR": 86.2}}
        return str(compared(rows(*gaps), [("CR", "CR", "accuracy")], published, "transformer"))

    assert "CR +2.0 (paper +1.9)" in told(0.02)
    assert told(0.02).endswith("no telling from one repetition on CR.")
    assert told(0.02, 0.04, 0.03).endswith("CR +3.0 ± 0.6 (paper +1.9): ahead on CR.")
    assert told(-0.02, -0.04, -0.03).endswith("behind on CR.")
    assert told(0.05, -0.04, 0.0).endswith("not told apart on CR.")
    assert told(0.01, 0.03, 0.02).endswith("not told apart on CR.")  # 3.5 standard errors of three: t wants 4.3
