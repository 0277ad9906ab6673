"""The masked copy task, its model, and Figure 5 of Clustered attention."""

from __future__ import annotations

import pytest
import torch

from clusterattn_papers.models import Answer
from clusterattn_papers.models.tagger import Tagger
from clusterattn_papers.reproduce import Context
from clusterattn_papers.reproduce._readings import CHOSEN, NEW, READINGS, TASK, TURNS
from clusterattn_papers.reproduce.clustered_fig5 import LONGER, SEEDS, ClusteredFig5
from clusterattn_papers.tasks import batches
from clusterattn_papers.tasks.copying import Copying
from clusterattn_papers.train import Settings, fit, judge


def test_the_target_is_0w0w_and_can_be_told_from_the_input() -> None:
    task = Copying(31)
    batch = task.collate(range(200))
    ids, targets = batch["ids"], batch["targets"]
    assert ids.shape == targets.shape == (200, 64)
    first, second = targets.split(32, 1)
    assert torch.equal(first, second)
    assert not first[:, 0].any()
    assert set(first[:, 1:].unique().tolist()) == set(range(1, 11))
    holes = ids == task.hole
    assert torch.equal(ids[~holes], targets[~holes])
    assert not (holes[:, :32] & holes[:, 32:]).any()
    assert not holes[:, [0, 32]].any()


def test_a_fifth_of_the_letters_is_masked_in_either_half() -> None:
    holes = Copying(63).collate(range(500))["ids"] == 11
    for half in holes.split(64, 1):
        assert half[:, 1:].float().mean() == pytest.approx(0.2, abs=0.01)


def test_an_example_does_not_depend_on_its_batch() -> None:
    task = Copying(15)
    whole, alone = task.collate(range(10, 20)), task.collate([13])
    assert torch.equal(whole["ids"][3:4], alone["ids"])
    assert torch.equal(whole["targets"][3:4], alone["targets"])


def test_seeds_and_splits_draw_other_examples() -> None:
    one, other = Copying(31, seed=0), Copying(31, seed=1)
    rows = [
        tuple(row)
        for task in (one, other)
        for split in ("train", "dev", "test")
        for row in task.collate(list(task.splits[split][:50]))["targets"].tolist()
    ]
    assert len(set(rows)) == len(rows) == 300


def test_accuracy_counts_masked_tokens() -> None:
    task = Copying(31, judged=64)

    class Parrot(torch.nn.Module):
        """Says what it sees, and 1 where it sees a hole."""

        def forward(self, ids: torch.Tensor) -> Answer:
            said = ids.masked_fill(ids == task.hole, 1)
            return Answer(torch.nn.functional.one_hot(said, task.hole).float(), torch.zeros(()))

    batch = task.collate(task.splits["dev"])
    holes = batch["ids"] == task.hole
    ones = (batch["targets"] == 1) & holes
    figures = task.judge(Parrot(), batches(task, "dev", 10))
    assert figures["accuracy"] == pytest.approx(float(ones.sum() / holes.sum()))
    assert figures["accuracy_all"] == pytest.approx(float((ones | ~holes).float().mean()))
    for name, half in (("accuracy_first", slice(None, 32)), ("accuracy_second", slice(32, None))):
        assert figures[name] == pytest.approx(float(ones[:, half].sum() / holes[:, half].sum())), name


GIVEN = "refined:clusters=4,top=8,parts=1,slope=false,steps=2"  # sizes that are left open follow the padded length


@pytest.mark.parametrize("method", ["exact", GIVEN, "reformer:chunk=4", "clusterformer:clusters=3"])
def test_padding_changes_nothing_of_what_a_tagger_says(method: str) -> None:
    torch.manual_seed(0)
    model = Tagger(12, 11, method, dim=16, heads=2, layers=2, length=16, dropout=0.0).eval()
    ids = torch.randint(12, (2, 13))
    padded = torch.cat([ids, torch.full((2, 5), 7)], 1)
    real = torch.arange(18) < 13
    plain, beside = model(ids, real[:13].expand(2, -1)), model(padded, real.expand(2, -1))
    torch.testing.assert_close(plain.logits, beside.logits[:, :13], atol=1e-5, rtol=1e-5)


def test_a_short_copy_task_can_be_learnt() -> None:
    task = Copying(5, symbols=4, judged=64)
    torch.manual_seed(0)
    model = task.model("exact", dim=32, heads=2, layers=2, feedforward=64, dropout=0.0)
    fitted = fit(task, model, Settings(steps=500, lr=3e-3, evaluate=100, target=0.99), device="cpu")
    assert judge(task, fitted.model, "test")["accuracy"] > 0.95


def test_wrong_sizes_are_told() -> None:
    with pytest.raises(ValueError, match="one half"):
        Copying(5, masked=0.7)
    with pytest.raises(ValueError, match="letters"):
        Copying(0)


def test_figure_5_runs_for_every_method(tmp_path) -> None:
    experiment, config = ClusteredFig5(), ClusteredFig5.scales["smoke"]
    rows = []
    for at, cell in enumerate(experiment.cells(config)):
        context = Context(torch.device("cpu"), None, tmp_path / str(at))
        rows += [{**cell.settings, **row} for row in experiment.run(cell, config, context)]
    names = {"full", "routing", "local", "improved", "clustered", "refined", "lsh", "smyrf", *READINGS}
    longer = {name: rule for rule in LONGER[config] for name in rule.methods}
    assert {row["method"] for row in rows} == names | longer.keys()
    seeds = {name: SEEDS if name in NEW else 1 for name in names}
    again = sum(len(rule.letters) * rule.seeds for rule in longer.values())
    assert len(rows) == sum(seeds.values()) * len(config.letters) + again
    assert {row["steps"] for row in rows if row["method"] in longer} == {6}
    for table in experiment.tables(rows, config):
        assert all(len(row) == len(table.columns) and "…" not in row for row in table.rows)
    assert experiment.tables([], config)[0].rows[0][1] == "100.00 | …"
    picture = experiment.picture(rows, config)
    assert picture is not None
    assert picture.startswith(b"\x89PNG")
    said = experiment.findings([{**row, "accuracy": 0.99 + (row["letters"] == 7) / 100} for row in rows], config)
    assert said[0].startswith("improved with 4 clusters gets 99.5% of the masked tokens at 1 of 2 lengths; the least")
    assert "99.00%" in said[0]
    assert said[0].endswith("at N = 24.")
    assert experiment.differences(config)
    assert not experiment.findings([], config)


def test_figure_5_counts_lengths_not_seeds_and_says_what_is_hard() -> None:
    rows = [
        {
            "method": "improved",
            "budget": 15,
            "letters": letters,
            "accuracy": 1 - (letters + seed == 256) / 10,
            "accuracy_all": 1.0,
        }
        for letters in (31, 255)
        for seed in range(3)
    ]
    said = ClusteredFig5().findings(rows, ClusteredFig5.scales["paper"])
    assert said[0].startswith("improved with 15 clusters gets 99.5% of the masked tokens at 1 of 2 lengths")
    assert "34 queries on average, and 32 near keys" in said[1]
    assert said[2] == "improved solves 5 of 6 cells (the paper: all)."


def test_figure_5_says_where_a_reading_fails_and_whether_it_was_still_learning() -> None:
    curve = [(1000, 0.2), (4000, 0.6), (5000, 0.7)]
    rows = [
        {"method": "clusterformer-task", "budget": 0, "letters": letters, "accuracy": accuracy, "curve": curve}
        for letters, accuracy in ((31, 1.0), (63, 0.66), (63, 0.68))
    ]
    said = ClusteredFig5().findings(rows, ClusteredFig5.scales["small"])
    assert said[-1] == (
        "clusterformer-task, mean over seeds, and what the last fifth of the updates brought on dev: "
        "67.0% at N = 128 (+10.0 points)."
    )


def test_figure_5_is_the_papers_at_small_scale() -> None:
    config = ClusteredFig5.scales["small"]
    assert [2 * (letters + 1) for letters in config.letters] == [64, 128, 256, 512]
    assert (config.layers, config.heads, config.dim // config.heads, config.feedforward) == (4, 6, 32, 768)
    assert (config.steps, config.batch, config.lr) == (5000, 32, 2e-4)
    assert len(ClusteredFig5().cells(config)) == 92 + 4 + 4 * SEEDS * len(NEW) + 2 * 3 + (4 + 2) * 3


def test_the_hardest_cell_is_run_longer_in_fp32_beside_the_others() -> None:
    """More updates, seeds and a Euclidean grouping, under names of their own: what is there keeps its cells."""
    figure, config = ClusteredFig5(), ClusteredFig5.scales["small"]
    longer = [cell for cell in figure.cells(config) if "most_steps" in cell.settings and "improved" in cell.name]
    assert [cell.name for cell in longer] == [
        f"improved, longer{kind}, length 512, seed {seed}" for kind in ("", ", euclid") for seed in range(3)
    ]
    for cell in longer:
        assert cell.settings["precision"] == "no"
        assert cell.settings["most_steps"] == 10_000
        assert ("metric=euclid" in cell.settings["spec"]) == ("euclid" in cell.name)
        assert "clusters=15" in cell.settings["spec"]
        assert "lr" not in cell.settings
    assert "most_steps" not in str(ClusteredFig5().cells(ClusteredFig5.scales["paper"]))


def test_the_later_reading_is_run_longer_at_every_length_and_what_more_updates_alone_bring_at_one() -> None:
    figure, config = ClusteredFig5(), ClusteredFig5.scales["small"]
    longer = [cell for cell in figure.cells(config) if cell.name.startswith("clusterformer") and "longer" in cell.name]
    assert len(longer) == (len(config.letters) + 2) * 3
    for cell in longer:
        assert cell.settings["most_steps"] == 2 * config.steps
        assert cell.settings["lr"] > config.lr
        assert ("ties=turns" in cell.settings["spec"]) == ("turns" in cell.name)
        assert ("affinity" in cell.settings["spec"]) == ("spread" not in cell.name)
    table, alone = figure.tables([], config)[-2:]
    assert [row[0] for row in table.rows] == [f"{TURNS}, longer, N = {n}" for n in (64, 128, 256, 512)]
    assert [row[0] for row in alone.rows] == [f"{TASK}, longer", f"{CHOSEN}, longer"]
    usual = {frozenset(cell.settings) for cell in figure.cells(config) if "longer" not in cell.name}
    assert usual == {frozenset({"method", "budget", "letters", "seed", "spec"})}


def test_longer_training_is_shown_with_where_it_stood_half_way() -> None:
    figure, config = ClusteredFig5(), ClusteredFig5.scales["small"]
    made = {"method": "improved, longer", "budget": 15, "letters": 255, "accuracy_all": 1.0, "seconds": 1.0}
    rows = [
        {**made, "accuracy": 0.998, "steps": 9000, "solved": 8000, "curve": [[2500, 0.5], [5000, 0.97], [9000, 0.998]]},
        {**made, "accuracy": 0.99, "steps": 10000, "solved": None, "curve": [[2500, 0.5], [5000, 0.95], [10000, 0.99]]},
    ]
    table = figure.tables(rows, config)[-3]
    assert table.rows[0] == ["improved, longer", "100.00 | 99.40 ± 0.57", "… | …", "96.00 ± 1.41", "8000, never"]
    assert table.rows[1][1:] == ["100.00 | …", "… | …", "…", "…"]
    assert "improved, longer solves 1 of 2 cells." in figure.findings(rows, config)
    assert "96.88" not in str(figure.tables(rows, config)[0].rows)
