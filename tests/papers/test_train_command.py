"""`clusterattn train`: one command makes a model folder, figures and a picture of a user's own file."""

from __future__ import annotations

import json
import random
import shutil

import pytest

pytest.importorskip("accelerate", reason='needs the extra "train"')
pytest.importorskip("typer", reason='needs the extra "cli"')
pytest.importorskip("matplotlib", reason='needs the extra "cli"')

from typer.testing import CliRunner

from clusterattn.cli import build
from clusterattn_papers import train

WORDS = {"praise": ["lovely", "splendid", "warm", "bright"], "blame": ["dreadful", "boring", "cold", "dull"]}
SMALL = ("--dim", 32, "--heads", 2, "--layers", 1, "--lr", 0.01, "--device", "cpu")


def command(*words):
    return CliRunner().invoke(build(), ["train", *map(str, words)])


@pytest.fixture
def reviews(tmp_path):
    """Long documents that a few words tell apart."""
    dice, path = random.Random(0), tmp_path / "reviews.csv"
    lines = [
        (label, " ".join(dice.choices([*some, "the", "film", "was"], k=dice.randint(60, 120))))
        for _ in range(60)
        for label, some in WORDS.items()
    ]
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for label, text in lines))
    return path


def test_a_csv_becomes_a_model_with_figures_and_a_picture(reviews, tmp_path):
    out = tmp_path / "model"
    done = command(
        "classify", "--data", reviews, "--out", out, "--method", "refined:clusters=4,top=8", "--epochs", 4, *SMALL
    )
    assert done.exit_code == 0, done.output
    assert "labels: praise 60, blame 60" in done.output
    assert "examples: 96 train, 12 dev, 12 test" in done.output
    assert "no better than" not in done.output
    assert {"model.safetensors", "config.json", "task.json", "history.jsonl"} <= {each.name for each in out.iterdir()}
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "metrics.json").read_text())["test"]["accuracy"] > 0.9
    task, model = train.load(out)
    said = task.predict(model, [" ".join(some * 20) for some in WORDS.values()])
    assert [label for label, _ in said] == list(WORDS)
    shutil.rmtree(out / "training")  # now it is a model that no training can go on with
    before = (out / "model.safetensors").read_bytes()
    refused = command("classify", "--data", reviews, "--out", out, *SMALL)
    assert refused.exit_code == 2
    assert "--out, a new folder or one whose training can go on" in " ".join(refused.output.split())
    assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["classify", "--data", "nowhere.csv"], "got nowhere.csv, which is not there"),
        (["classify", "--data", "{reviews}", "--method", "refned"], 'try method="refined"'),
        (["classify", "--data", "{reviews}", "--heads", "5"], "wanted --heads that divides --dim"),
        (["sing", "--data", "{reviews}"], "classify"),
        (["pairs", "--data", "{reviews}"], "text_a"),
        (["classify", "--data", "{reviews}", "--out", "{reviews}/model"], "wanted --out, a folder"),
    ],
)
def test_what_is_wrong_is_said_and_leaves_nothing_behind(reviews, tmp_path, words, sentence):
    out = [] if "--out" in words else ["--out", tmp_path / "model"]
    refused = command(*SMALL, *out, *(word.format(reviews=reviews) for word in words))
    assert refused.exit_code == 2, refused.output
    assert sentence in " ".join(refused.output.split())
    assert [each.name for each in tmp_path.iterdir()] == ["reviews.csv"]


def test_a_warning_is_one_plain_sentence(tmp_path):
    path = tmp_path / "twice.csv"
    path.write_text("text,label\n" + "one two,a\nthree four,b\n" * 10)
    done = command("classify", "--data", path, "--out", tmp_path / "model", "--epochs", 1, *SMALL)
    assert done.exit_code == 0, done.output
    assert "warning: 20 examples have only 2 different texts: training knows what is held out\n" in done.output
    assert "UserWarning" not in done.output


def test_exact_attention_is_trained_beside_the_method(reviews, tmp_path):
    out = tmp_path / "model"
    words = ("classify", "--data", reviews, "--out", out, "--method", "refined:clusters=4,top=8", "--epochs", 4, *SMALL)
    done = command(*words, "--baseline")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    shown = [line[:2] for line in lines if line[:1] in (["dev"], ["test"])]
    assert shown == [[split, method] for split in ("dev", "test") for method in ("refined:clusters=4,top=8", "exact")]
    assert json.loads((out / "baseline" / "config.json").read_text())["method"]["method"] == "exact"
    again = command(*words, "--baseline", "--json")  # both are done: nothing is trained again
    figures = json.loads(again.stdout)
    assert figures["baseline"]["test"] == json.loads((out / "baseline" / "metrics.json").read_text())["test"]
    assert figures["test"] == json.loads((out / "metrics.json").read_text())["test"]
    alone = command("classify", "--data", reviews, "--out", tmp_path / "other", "--method", "exact", *SMALL)
    assert alone.exit_code == 0, alone.output
    after = json.loads((tmp_path / "other" / "metrics.json").read_text())
    assert set(after) == set(json.loads((out / "baseline" / "metrics.json").read_text()))
    refused = command("classify", "--data", reviews, "--out", tmp_path / "third", "--method", "exact", "--baseline")
    assert refused.exit_code == 2
    assert "another method than exact" in " ".join(refused.output.split())


def test_it_is_said_when_nothing_was_learnt(tmp_path):
    """Words that say nothing about the labels, of which one is far commoner."""
    dice, path = random.Random(0), tmp_path / "noise.csv"
    rows = [
        " ".join(dice.choices("abcdefgh", k=12)) + ("," + ("rare" if at % 5 == 0 else "common")) for at in range(60)
    ]
    path.write_text("text,label\n" + "\n".join(rows) + "\n")
    done = command("classify", "--data", path, "--out", tmp_path / "model", "--epochs", 1, *SMALL)
    assert done.exit_code == 0, done.output
    assert "labels: common 48, rare 12" in done.output
    assert "refined is no better than always answering 'common', which is right in" in done.output


def test_labels_that_can_hardly_be_learnt_are_named(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("text,label\n" + "".join(f"words about {at} and {at % 7},{at % 30}.5\n" for at in range(59)))
    done = command("classify", "--data", path, "--out", tmp_path / "model", "--epochs", 1, *SMALL)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "warning: 1 label has a single example (29.5)" in said
    assert "warning: all 30 labels are numbers" in said
    assert "(30 in all)" in said


def test_all_mistakes_of_a_file_come_in_one_message(tmp_path):
    path = tmp_path / "bad.csv"
    good = [f"text {at},{'ab'[at % 2]}" for at in range(12)]
    path.write_text("\n".join(["text,label", *good[:4], "no label,", *good[4:], ",a", "one, two,b", "alone"]) + "\n")
    refused = command("classify", "--data", path, "--out", tmp_path / "model", *SMALL)
    assert refused.exit_code == 2
    said = " ".join(refused.output.split())
    assert "got 4 lines with some" in said
    for each in ("line 6: wanted a label", "line 15: wanted a text", "line 16: wanted 2 cells", "line 17: wanted 2"):
        assert each in said
