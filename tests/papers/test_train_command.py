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
    assert "labels: blame, praise" in done.output
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
