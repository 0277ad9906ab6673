"""advise: the answer follows from what was measured, in both directions; on tiny shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import clusterattn as ca
from clusterattn.measure import crossings as measuring
from clusterattn.measure import mixture
from clusterattn.methods import auto
from clusterattn.tuning import advice
from clusterattn.tuning.advice import Times, lengths_up_to, pays_from

EASY = mixture(1, 2, 300, 8, centres=5, spread=0.01)  # which a few clusters answer nearly exactly
TINY: dict[str, Any] = {"heads": 2, "dim": 8, "length": 600, "data": EASY, "store": False, "repetitions": 1}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls of exact attention and of ours take what this says, a function of the length."""

    def given(exact: Any, ours: Any) -> None:
        def interleaved(runs: Any, **options: Any) -> dict[str, list[float]]:
            n = len(runs["sdpa"]()[0, 0])
            return {label: [(exact if label == "sdpa" else ours)(n)] for label in runs}

        monkeypatch.setattr(advice, "interleaved", interleaved)

    return given


def test_it_pays_from_where_it_is_clearly_faster(clock: Any) -> None:
    clock(lambda n: 1e-8 * n * n, lambda n: 4e-6 * n)  # level at 400
    found = ca.advise(**TINY)
    assert found.worth
    assert found.crossing == pytest.approx(400 / auto.GAIN, rel=0.05)
    assert found.speedup == pytest.approx(1e-8 * 600 * 600 / (4e-6 * 600))
    assert found.error is not None
    assert found.error <= found.tolerance == 0.05
    assert found.plan.exact_below == found.crossing
    assert found.plan.length == 600
    chosen = found.plan.layers["*"]
    inside = [each for each in found.candidates if each.inside]
    assert chosen == min(inside, key=lambda each: each.cost_share).method
    assert f"Worth it from {found.crossing} tokens on" in str(found)
    assert {row["n"] for row in found.rows} == {300, 600}
    assert all(row["measured"] and row["memory_bytes"] > 0 for row in found.rows)


def test_exact_attention_is_an_answer(clock: Any) -> None:
    clock(lambda n: 1e-8 * n * n, lambda n: 1.6e-5 * n)  # level at 1600: later than asked
    found = ca.advise(**TINY)
    assert not found.worth
    assert dict(found.plan.layers) == {}
    assert found.plan.note["exact_wins"]
    assert found.crossing is not None
    assert found.crossing > 600
    assert "Use exact attention" in found.answer
    assert f"from about {found.crossing} tokens on" in found.answer
    clock(lambda n: 1e-8 * n * n, lambda n: 1e-3 * n * n)
    never = ca.advise(**TINY)
    assert never.crossing is None
    assert "does not overtake it" in never.answer


def test_nothing_inside_the_tolerance(clock: Any) -> None:
    clock(lambda n: 1e-8 * n * n, lambda n: 1e-7 * n)
    found = ca.advise(**{**TINY, "data": mixture(1, 2, 300, 8, spread=2.0)}, tolerance=1e-6)
    assert not found.worth
    assert "nothing cheaper stays within 1e-06" in found.answer
    assert found.error == min(each.error for each in found.candidates)
    assert not found.plan.layers


def test_lengths_that_would_take_too_long_are_predicted(clock: Any) -> None:
    clock(lambda n: 1.0 * (n / 300) ** 2, lambda n: 0.1 * n / 300)
    found = ca.advise(**TINY, seconds=5.0)
    assert {row["n"]: row["measured"] for row in found.rows} == {300: True, 600: False}
    (exact,) = (row for row in found.rows if row["n"] == 600 and row["method"] == "sdpa")
    assert exact["seconds"] == pytest.approx(4.0, rel=0.1)
    assert exact["memory_bytes"] is None
    assert "timed up to 300 tokens" in str(found)


def test_backward_and_causal_are_measured(clock: Any) -> None:
    found = ca.advise(**TINY, backward=True, causal=True)
    assert "causal, forward+backward" in found.about
    assert {row["pass"] for row in found.rows} == {"forward+backward"}
    assert "the gradients' were not measured" in str(found)


def test_times_between_and_beyond() -> None:
    line = Times({100: 2.0, 200: 3.0}, float)  # 1 + n / 100
    assert [line.at(n) for n in (100, 150, 200, 400)] == [2.0, 2.5, 3.0, 5.0]
    assert Times({100: 2.0}, float).at(300) == 6.0
    assert Times({100: 2.0, 200: 1.9}, float).at(400) > 1.9  # noise
    half = Times({100: 1.5, 200: 2.0}, float)  # 1 + n / 200, so that (1 + n / 200) / 0.9 = n / 100 at 250
    assert pays_from(Times({100: 1.0}, float), half, 1000) == pytest.approx(250, rel=0.01)
    assert pays_from(Times({100: 1.0}, float), half, 240) is None
    assert lengths_up_to(3000, 500) == [750, 1500, 3000]
    assert lengths_up_to(100) == [100]


def test_this_machines_crossings_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Any) -> None:
    monkeypatch.setattr(auto, "_user_file", lambda: tmp_path / "crossings.json")
    monkeypatch.setattr(measuring, "LENGTHS", {"cpu": (32, 64)})
    steps: list[tuple[str, int]] = []
    found = ca.advise(**{**TINY, "store": True}, tick=lambda *step: steps.append(step))
    auto._entries.cache_clear()
    auto._predicted.cache_clear()
    assert found.crossings_file == tmp_path / "crossings.json"
    (entry,) = json.loads(found.crossings_file.read_text())["entries"]
    assert (entry["dtypes"], entry["causal"]) == (["float32"], False)
    assert len(steps) == steps[-1][1], "the last step is the last that was announced"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "heads, dim and length, or a model and batches; got neither"),
        ({"heads": 2, "dim": 8}, "all three; got heads=2, dim=8, length=None"),
        ({"heads": 0, "dim": 8, "length": 100}, "heads=a whole number >= 1"),
        ({"heads": 1, "dim": 8, "length": 100, "tolerance": 2.0}, "tolerance between 0 and 1"),
        ({"model": torch.nn.Linear(1, 1), "heads": 1}, "got both"),
        ({"model": torch.nn.Linear(1, 1)}, "batches for the model"),
        ({"heads": 1, "dim": 8, "length": 100, "batches": []}, "and batches"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ca.advise(**given)


# ---------------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    pytest.importorskip("transformers")
    import tiny_models as tiny

    return tiny.bert()


def batches(length: int = 96) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(60, (2, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]


def seconds_of(exact: float, tuned: float) -> Any:
    def seconds(bench: Any, choice: Any, repetitions: int = 3) -> dict[str, float]:
        n = bench.batches[0]["input_ids"].shape[1]
        return {"exact": exact * n * n, "tuned": tuned * n}

    return seconds


def test_a_model_gets_a_plan_and_a_length(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from clusterattn.tuning.bench import Bench

    monkeypatch.setattr(Bench, "seconds", seconds_of(1.0, 30.0))  # level at 30
    monkeypatch.setattr(Bench, "_seconds", lambda bench, call, candidates: [*range(1, len(candidates)), 1000])
    found = ca.advise(model, batches(), tolerance=0.5, store=False, name="tiny")
    assert found.worth
    assert found.about.startswith("tiny, 2 sequences of up to 96 tokens")
    assert found.crossing == pytest.approx(30 / auto.GAIN, rel=0.15)  # on a straight line between 24 and 48
    assert found.plan.layers
    assert found.plan.exact_below == found.crossing
    assert found.speedup == pytest.approx(96 / 30)
    assert found.error == found.plan.note["error"] <= 0.5
    report = ca.hf.swap(model, found.plan)
    ca.hf.restore(model)
    assert report.swapped == list(found.plan.layers)


def test_a_model_may_be_better_off_with_exact_attention(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clusterattn.tuning.bench import Bench

    monkeypatch.setattr(Bench, "seconds", seconds_of(1.0, 3000.0))
    found = ca.advise(model, batches(), tolerance=0.5, store=False)
    assert not found.worth
    assert not found.plan.layers
    assert "Use exact attention" in found.answer
    assert model.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------------------------------------------- the command


def run(*words: Any) -> Any:
    pytest.importorskip("typer")
    pytest.importorskip("matplotlib")
    from typer.testing import CliRunner

    from clusterattn import cli

    return CliRunner().invoke(cli.build(), ["advise", *(str(word) for word in words)])


@pytest.fixture
def qkv(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    path = tmp_path / "easy.safetensors"
    save_file({"q": EASY.q, "k": EASY.k, "v": EASY.v}, path)
    return path


SHAPE = ("--heads", 1, "--dim", 8, "--length", 300, "--repetitions", 1, "--no-store")


def test_the_command_writes_a_page_a_plan_and_a_picture(qkv: Path, tmp_path: Path, clock: Any) -> None:
    clock(lambda n: 1e-6 * n * n, lambda n: 1e-5 * n)
    shown = run(*SHAPE, "--qkv", qkv, "--out", tmp_path / "advice")
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.stdout.split())
    assert "Worth it from 300 tokens on" in text
    assert "30.00×" in text
    assert {each.name for each in (tmp_path / "advice").iterdir()} == {"plan.json", "rows.jsonl", "advice.png"}
    assert (tmp_path / "advice" / "advice.png").read_bytes().startswith(b"\x89PNG")
    assert list(ca.Plan.load(tmp_path / "advice" / "plan.json").layers) == ["*"]


def test_json_is_all_there_is(qkv: Path, tmp_path: Path, clock: Any) -> None:
    clock(lambda n: 1e-6 * n * n, lambda n: 1.0 * n)
    found = json.loads(run(*SHAPE, "--qkv", qkv, "--out", tmp_path / "advice", "--json").stdout)
    assert not found["worth"]
    assert "Use exact attention" in found["answer"]
    assert found["plan"]["layers"] == {}
    assert found["candidates"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no --heads, --dim, --length"),
        (["--heads", 2], "no --dim, --length"),
        (["--data", "book.txt", "--heads", 1, "--dim", 8, "--length", 9], "--data without a MODEL"),
        (["some-model"], "no --data"),
        (["some-model", "--data", "x", "--heads", 2], "a MODEL and --heads"),
        (["--heads", 1, "--dim", 8, "--length", 64, "--device", "abacus"], "cpu or cuda"),
        (["--heads", 1, "--dim", 8, "--length", 64, "--dtype", "int7"], "int7"),
        (["--heads", 1, "--dim", 8, "--length", 64, "--qkv", "not/there.safetensors"], "not there"),
        (["--heads", 1, "--dim", 8, "--length", 64, "--tolerance", 3], "tolerance between 0 and 1"),
    ],
)
def test_bad_words_are_refused_in_one_sentence(words: list[Any], told: str) -> None:
    shown = run(*words)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert shown.stderr.startswith("error: wanted ")
    assert told in shown.stderr


def test_help_teaches() -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    assert "clusterattn advise --heads 16 --dim 64 --length 30000" in " ".join(shown.stdout.split())


def test_the_command_takes_a_model_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    import tiny_models as tiny

    from clusterattn.tuning.bench import Bench

    monkeypatch.setattr(Bench, "seconds", seconds_of(1.0, 30.0))
    monkeypatch.setattr(Bench, "_seconds", lambda bench, call, candidates: [*range(1, len(candidates)), 1000])
    folder = tiny.saved(tmp_path / "model", tiny.bert())
    (tmp_path / "book.txt").write_text(tiny.text(300))
    words = ("--data", tmp_path / "book.txt", "--length", 64, "--tolerance", 0.5, "--limit", 2)
    shown = run(folder, *words, "--no-store", "--out", tmp_path / "advice")
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.stdout.split())
    assert "Swap the plan in" in text
    assert "encoder.layer.0.attention.self" in text
    plan = ca.Plan.load(tmp_path / "advice" / "plan.json")
    assert plan.layers
    assert plan.exact_below > 0
    assert (tmp_path / "advice" / "advice.png").read_bytes().startswith(b"\x89PNG")
