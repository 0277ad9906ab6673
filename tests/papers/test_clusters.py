"""The clusters of a model: the figures against brute force, and the command on tiny models made here."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("accelerate")
import tiny_models as tiny
from typer.testing import CliRunner

from clusterattn import cli
from clusterattn_papers.clusters import KINDS, adjusted_rand, kind_of, nearness, oftener
from clusterattn_papers.plots_clusters import colours


def run(*words):
    return CliRunner().invoke(cli.build(), [str(word) for word in words])


def labels(count, n, clusters, seed=0):
    return torch.randint(clusters, (count, n), generator=torch.Generator().manual_seed(seed))


def rand_by_pairs(one, other):
    """From its definition: pairs that both groupings keep together, beside what chance would give."""
    pairs = list(itertools.combinations(range(len(one)), 2))
    mine, theirs = ([bool(each[i] == each[j]) for i, j in pairs] for each in (one, other))
    both = sum(a and b for a, b in zip(mine, theirs, strict=True))
    chance = sum(mine) * sum(theirs) / len(pairs)
    return (both - chance) / ((sum(mine) + sum(theirs)) / 2 - chance)


def test_agreement_is_the_adjusted_rand_index():
    one, other = labels(3, 17, 4), labels(2, 17, 3, seed=1)
    wanted = torch.tensor([[rand_by_pairs(a, b) for b in other] for a in one], dtype=torch.float64)
    torch.testing.assert_close(adjusted_rand(one, other), wanted)


def test_agreement_knows_clusters_by_their_members_not_by_their_names():
    one = labels(1, 40, 5)
    renamed = torch.tensor([3, 0, 4, 1, 2])[one]
    assert adjusted_rand(one, renamed).item() == pytest.approx(1)
    alone = torch.zeros_like(one)
    assert adjusted_rand(alone, alone).item() == 1  # one cluster for all, twice: the same
    assert adjusted_rand(one, alone).item() == pytest.approx(0)


def test_unrelated_groupings_agree_by_chance():
    assert adjusted_rand(labels(20, 300, 6), labels(20, 300, 6, seed=1)).mean().abs() < 0.01


def test_what_clusters_hold_by_pairs():
    groups, classes = labels(2, 15, 3), labels(1, 15, 4, seed=2)[0]
    pairs = list(itertools.combinations(range(15), 2))
    for found, near, mine in zip(oftener(groups, classes), nearness(groups), groups, strict=True):
        together = [(i, j) for i, j in pairs if mine[i] == mine[j]]
        inside = sum(bool(classes[i] == classes[j]) for i, j in together) / len(together)
        anywhere = sum(bool(classes[i] == classes[j]) for i, j in pairs) / len(pairs)
        assert found.item() == pytest.approx(inside / anywhere)
        distance = sum(j - i for i, j in together) / len(together)
        assert near.item() == pytest.approx(distance / (sum(j - i for i, j in pairs) / len(pairs)))


def test_classes_may_differ_from_head_to_head():
    groups = labels(2, 30, 3)
    assert oftener(groups, groups)[0] == oftener(groups[:1], groups[0])[0]


@pytest.mark.parametrize(
    ("word", "special", "marked", "wanted"),
    [
        ("[CLS]", True, False, "special"),
        (",", False, False, "punctuation"),
        ("Ġ,", False, True, "punctuation"),
        ("1984", False, False, "number"),
        ("##ing", False, False, "continuation"),
        ("ing", False, True, "continuation"),
        ("Ġthe", False, True, "short word"),
        ("house", False, False, "word"),
        ("▁house", False, True, "word"),
    ],
)
def test_kinds_of_tokens(word, special, marked, wanted):
    assert kind_of(word, special, marked) == wanted
    assert wanted in KINDS


def test_a_cluster_keeps_its_number_over_layers():
    first, second = torch.tensor([5, 5, 5, 2, 2, 9]), torch.tensor([1, 1, 1, 7, 7, 7])
    assert colours([first, second]).tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 1]]


def test_the_command_tells_of_every_head_and_draws_it(tmp_path):
    model = tiny.saved(tmp_path / "bert", tiny.bert())
    book = tmp_path / "book.txt"
    book.write_text(tiny.text(300))
    out = tmp_path / "out"
    shown = run("clusters", model, "--data", book, "--length", 60, "--limit", 3, "--batch", 2, "--out", out)
    assert shown.exit_code == 0, shown.output
    assert {each.name for each in out.iterdir()} == {
        "clusters.md", "agreement.png", "holds.png", "tokens.png", "rows.jsonl",
    }  # fmt: skip
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert [(row["layer"][-12:], row["head"]) for row in rows] == [
        (name, head) for name in ("0.attention.self"[-12:], "1.attention.self"[-12:]) for head in range(4)
    ]
    for row in rows:
        assert row["sequences"] == 3
        assert row["method"] == "refined:clusters=4"
        assert 1 <= row["used"] <= 4
        assert 0.25 <= row["largest"] <= 1
        assert -0.5 <= row["again"] <= 1
    page = (out / "clusters.md").read_text()
    for question in ("Do they persist?", "Do heads differ?", "What do they hold?"):
        assert question in page
        assert question in " ".join(shown.stdout.split())
    assert "the clusters of the first sequence" in page


def test_tokens_in_clusters_of_a_model_that_looks_at_tokens_alone(tmp_path):
    """Without positions a query is its token: two queries of a cluster hold one token far oftener than any two."""
    made = tiny.bert()
    with torch.no_grad():
        made.embeddings.position_embeddings.weight.zero_()
    model = tiny.saved(tmp_path / "bert", made)
    (tmp_path / "book.txt").write_text(tiny.text(200))
    shown = run("clusters", model, "--data", tmp_path / "book.txt", "--length", 100, "--method",
                "refined:clusters=20,steps=10", "--layers", r"layer\.0", "--json")  # fmt: skip
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.stdout)
    assert len(rows) == 4
    assert all(row["next"] is None for row in rows)
    assert all(row["token"] > 5 for row in rows)


def test_causal_models_and_speech(tmp_path):
    (tmp_path / "book.txt").write_text(tiny.text(200))
    shown = run("clusters", tiny.saved(tmp_path / "llama", tiny.llama()), "--data", tmp_path / "book.txt", "--length",
                50, "--limit", 2, "--json")  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert len(json.loads(shown.stdout)) == 2 * 4
    sounds = tiny.clips(tmp_path / "clips", {"one": "w1 w2"})
    shown = run("clusters", tiny.whisper(tmp_path / "whisper"), "--data", sounds, "--out", tmp_path / "heard",
                "--method", "clustered:clusters=6")  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert not (tmp_path / "heard" / "tokens.png").exists()  # no words to write under it
    assert "same token" not in shown.stdout


def test_refusals(tmp_path):
    model = tiny.saved(tmp_path / "bert", tiny.bert())
    (tmp_path / "book.txt").write_text(tiny.text(100))
    words = ["clusters", model, "--data", tmp_path / "book.txt", "--length", 40]
    wrong = run(*words, "--method", "smyrf")
    assert wrong.exit_code == 2
    assert "clustered, improved or refined" in wrong.output
    nowhere = run(*words, "--layers", "decoder")
    assert nowhere.exit_code == 2
    assert "decoder" in nowhere.output
    broken = run(*words, "--layers", "(")
    assert broken.exit_code == 2
    assert "regular expression" in broken.output
    missing = run("clusters", model, "--data", tmp_path / "nothing.txt")
    assert missing.exit_code == 2
