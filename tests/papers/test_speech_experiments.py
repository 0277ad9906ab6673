"""The speech experiments at their smallest: tables, figures and findings from rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterattn_papers.reproduce import Context, _speech
from clusterattn_papers.reproduce import clustered_speech as speech_tables
from clusterattn_papers.reproduce import clustered_speech_figures as speech_figures
from clusterattn_papers.reproduce._experiment import Cell
from clusterattn_papers.reproduce._speech import FINE_TUNED, PAPER, SHOWN, SMALL, thinned
from clusterattn_papers.train import Fitted, checkpoint, fit


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    pytest.importorskip("accelerate")
    found = {}
    for made in (speech_tables.ClusteredTable1(), speech_tables.ClusteredTable3()):
        config = made.scales["smoke"]
        found[made.name] = [
            {**cell.settings, **row}
            for cell in made.cells(config)
            for row in made.run(cell, config, Context(torch.device("cpu"), None, tmp_path_factory.mktemp("work")))
        ]
    return found


@pytest.mark.parametrize("kind", [*speech_tables.EXPERIMENTS, *speech_figures.EXPERIMENTS], ids=lambda kind: kind.name)
def test_smoke(kind: type, rows: dict[str, list[dict[str, object]]]) -> None:
    shown = kind()
    config, mine = shown.scales["smoke"], rows[shown.rows_from or shown.name]
    tables = shown.tables(mine, config)
    assert tables
    assert all(len(line) == len(table.columns) for table in tables for line in table.rows)
    assert not any("…" in cell for table in tables for line in table.rows for cell in line)
    assert shown.tables([], config)
    assert all(map(str, shown.differences(config)))
    assert all(shown.differences(each) for each in shown.scales.values())
    assert shown.findings(mine, config)
    assert shown.findings([], config) == []
    picture = shown.picture(mine, config)
    assert (picture or b"").startswith(b"\x89PNG") == (kind in (speech_figures.Figure1, speech_figures.Figure7))


def test_updates_of_an_epoch_are_counted_however_fast_they_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    found: list[Fitted] = []

    def fast(*given: Any, **more: Any) -> Fitted:
        found.append(replace(fit(*given, **more), seconds=1e-5))
        return found[0]

    monkeypatch.setattr(_speech, "fit", fast)
    table = speech_tables.ClusteredTable1()
    cell, config = Cell("", {"trained": "full", "layers": 1, "seed": 0}), table.scales["smoke"]
    row = table.run(cell, config, Context(torch.device("cpu"), None, tmp_path / "work"))[0]
    assert speech_tables.per_epoch(row) == pytest.approx(found[0].steps / found[0].epochs)


def test_more_clusters_are_tuned_from_fewer_where_the_paper_does_so(rows: dict[str, list[dict[str, object]]]) -> None:
    tuned = {
        (row["trained"], row["layers"]): row["tuned_from"] for row in rows["clustered-table1"] if "tuned_from" in row
    }
    assert tuned == {("improved-200", 2): "improved-100"}
    rule = FINE_TUNED[PAPER]
    assert (rule.epochs, rule.lr) == (15, 1e-5)
    assert {name: rule.start(name) for name, _ in PAPER.also} == {
        "full": None,
        "improved-100": None,
        "improved-200": "improved-100",
        "clustered-200": "clustered-100",
        "clustered-300": "clustered-100",
    }
    assert SMALL not in FINE_TUNED
    figure = speech_figures.Figure1()
    assert "from scratch" in figure.differences(SMALL)[-1]
    assert "15 epochs at 1e-05; published: 15 epochs" in figure.differences(PAPER)[-1]


def test_tuning_starts_from_the_weights_that_were_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = speech_tables.ClusteredTable1()
    config = table.scales["smoke"]
    cells = {cell.name: cell for cell in table.cells(config)}
    started: list[dict[str, torch.Tensor]] = []
    fit = _speech.fit

    def noted(task, model, settings, **options):  # type: ignore[no-untyped-def]
        started.append({name: each.clone() for name, each in model.state_dict().items()})
        return fit(task, model, settings, **options)

    monkeypatch.setattr(_speech, "fit", noted)
    for at, name in enumerate(("improved-100, 2 layers, seed 0", "improved-200, 2 layers, seed 0")):
        table.run(cells[name], config, Context(torch.device("cpu"), None, tmp_path / str(at)))
    kept = checkpoint.weights(tmp_path / "improved-100-2-0.safetensors")
    assert len(started) == 2  # the first model was not trained again
    assert kept.keys() == started[1].keys()
    assert all(each.equal(started[1][name]) for name, each in kept.items())
    assert any(not each.equal(started[0][name]) for name, each in kept.items())
    elsewhere = tmp_path / "elsewhere" / "cell"
    table.run(cells["improved-200, 2 layers, seed 0"], config, Context(torch.device("cpu"), None, elsewhere))
    assert len(started) == 4  # nothing was left there: first the one, then the other
    assert all(each.equal(started[3][name]) for name, each in kept.items())


def test_table1_has_the_papers_cells(rows: dict[str, list[dict[str, object]]]) -> None:
    mine = rows["clustered-table1"]
    mine = [row for row in mine if "evaluated" in row]
    cells = {(row["evaluated"], row["trained"]) for row in mine if row["layers"] == 1}
    published = set(speech_tables.TABLE1)
    ours = {cell for cell in cells if not any(str(name).startswith("refined") for name in cell)}
    assert ours == published
    assert len(published) == 42
    whole = [row["kl"] for row in mine if row["evaluated"] in ("full", "shared-full")]
    assert whole
    assert all(abs(float(str(each))) < 1e-6 for each in whole)


def test_findings_read_the_papers_own_table() -> None:
    table, config = speech_tables.ClusteredTable1(), SMALL
    copied = [
        {"evaluated": one, "trained": two, "layers": config.layers, "seed": 0, "dev": value / 100, "kl": value}
        for (one, two), value in speech_tables.TABLE1.items()
    ]
    lines = table.findings(copied, config)
    text = "ahead in 5 of 6 columns (behind when trained with clustered-100)"
    assert (
        lines[0] == f"improved-100 against clustered-100: by distance from full attention {text}; by error rate "
        f"{text}; in the paper, by error rate, {text}."
    )
    assert any(
        "improved-100 against oracle-top: by distance from full attention ahead in 6 of 6 columns;" in line
        for line in lines
    )


def test_table1_says_which_columns_the_seeds_do_not_decide() -> None:
    def column(trained: str, *more: float) -> list[dict[str, object]]:
        """Errors of improved-100 less those of clustered-100, seed by seed."""
        return [
            {**model_row(name, seed, 0.3 + each * (name == "improved-100")), "trained": trained}
            for seed, each in enumerate(more)
            for name in ("improved-100", "clustered-100")
        ]

    rows = column("full", -0.03, -0.02, -0.03) + column("lsh-1", 0.03, 0.02, 0.03) + column("lsh-4", 0.1, -0.1, 0.05)
    (line,) = speech_tables.ClusteredTable1().findings(rows, SMALL)
    told = "ahead in 1 of 3 columns (behind when trained with lsh-1; not told apart when trained with lsh-4)"
    assert f"by error rate {told}" in line
    assert "by distance from full attention ahead in 0 of 3 columns (not told apart when trained with full," in line


def pace_row(name: str, seconds: float) -> dict[str, object]:
    return {"trained": name, "layers": SMALL.layers, "pace": True, "pass": "answering", "seconds": seconds}


def model_row(name: str, seed: int, test: float, loss: float = 1.0) -> dict[str, object]:
    history = [[1, 0.5, 3.0, 3.0, 1.0], [2, 1.0, loss, 2.0, 0.5]]
    return {
        "evaluated": name,
        "trained": name,
        "layers": SMALL.layers,
        "seed": seed,
        "dev": test,
        "kl": 0.1,
        "test": test,
        "history": history,
    }


def test_methods_without_a_common_column_are_not_compared() -> None:
    rows = [model_row("improved-100", 0, 0.2), model_row("lsh-1", 0, 0.3)]
    assert speech_tables.ClusteredTable1().findings(rows, SMALL) == []


def test_findings_go_seed_by_seed() -> None:
    rows = [model_row("full", seed, 0.2 + seed / 10) for seed in range(3)]
    rows += [model_row("improved-100", seed, 0.19 + seed / 10, loss=1.5) for seed in range(3)]
    rows += [model_row("clustered-100", 0, 0.25, loss=1.25)]
    said = speech_tables.ClusteredTable2().findings(rows, SMALL)
    assert (
        said[0] == "improved-100 against full, points of error rate on test: -1.00 ± 0.00 (ahead, the paper's "
        "+0.58, the other way round)."
    )
    assert "clustered-100, points of error rate on test: -6.00 (one run, the paper's -1.89)" in said[1]
    assert len(said) == 2  # nothing is said of speed that was not measured
    paces = [{**pace_row("full", 0.02), "pass": "training"}, {**pace_row("improved-100", 0.01), "pass": "training"}]
    said = speech_tables.ClusteredTable2().findings(rows + paces, SMALL)
    assert "improved-100 is 2.00 times as fast as with full" in said[-1]
    said = speech_figures.Figure7().findings(rows, SMALL)
    assert "least first: full 1.000, clustered-100 1.250, improved-100 1.500" in said[0]
    assert "improved-100 against clustered-100, nats at the end: +0.250 (one run)" in said[1]
    assert speech_figures.Figure1().findings(rows, SMALL) == []
    rows += [pace_row(name, 1.0 + (name == "improved-100")) for name in ("full", "improved-100", "clustered-100")]
    said = speech_figures.Figure1().findings(rows, SMALL)
    assert said == ["Both faster and better than improved-100 with 4 layers, of 2 others: none, as in the paper."]
    rows += [model_row("clustered-100", 1, 0.28), model_row("clustered-100", 2, 0.41), pace_row("lsh-4", 1.0)]
    rows += [model_row("lsh-4", seed, 0.15 + seed / 10) for seed in range(3)]
    said = speech_figures.Figure1().findings(rows, SMALL)
    assert said[0].endswith(
        "of 3 others: lsh-4 with 4 layers, unlike in the paper; faster and not told apart: clustered-100 with 4 layers."
    )


def test_each_table_names_the_data_it_stands_for() -> None:
    said = " ".join(speech_tables.ClusteredTable3().differences(speech_tables.ClusteredTable3.scales["small"]))
    assert "Wall Street" not in said
    assert "80 filter-banks" in said
    assert "1500 frames on average, longer than the published 534 (at most 3850)" in said
    assert "published: 12 layers, lr 0.0002" in said
    said = " ".join(speech_tables.ClusteredTable1().differences(SMALL))
    assert "Switchboard" not in said
    assert "780 frames on average, as published" in said


@pytest.mark.parametrize("length", [0, 1, 59, 60, 61, 119, 120, 121, 1000])
def test_a_thinned_history_ends_where_the_whole_one_does(length: int) -> None:
    kept = [line["step"] for line in thinned([{"step": at} for at in range(length)])]
    assert len(kept) <= SHOWN
    assert kept[-1:] == list(range(length))[-1:]
