"""tune: the plan it returns holds its promise, measured here anew; interrupted runs go on; same input, same plan."""

from __future__ import annotations

import json
import re

import pytest
import torch

import clusterattn as ca

pytest.importorskip("transformers")
import tiny_models as tiny

from clusterattn.measure.cost import Shape, multiply_adds
from clusterattn.tuning.bench import Layer, usual_candidates
from clusterattn.tuning.search import Search

FEW = [f"refined:clusters={c},top={t}" for c, t in ((6, 4), (6, 16), (16, 32), (4, 64))]


@pytest.fixture(scope="module")
def model():
    return tiny.bert()


@pytest.fixture(scope="module")
def batches():
    """Two batches, one of them padded."""
    made = tiny.tokenizer()
    texts = [[tiny.text(120, 1), tiny.text(120, 2)], [tiny.text(120, 3), tiny.text(80, 4)]]
    found = [made(each, padding=True, return_tensors="pt") for each in texts]
    return [{"input_ids": each["input_ids"], "attention_mask": each["attention_mask"]} for each in found]


def output_error(model, batches, plan):
    """The promise, by other means than tune's own."""
    miss = size = 0.0
    with torch.no_grad():
        for batch in batches:
            real = batch["attention_mask"].bool() if "attention_mask" in batch else ...
            ca.hf.restore(model)
            truth = model.base_model(**batch).last_hidden_state[real].double()
            ca.hf.swap(model, plan)
            ours = model.base_model(**batch).last_hidden_state[real].double()
            ca.hf.restore(model)
            miss += float((ours - truth).square().sum())
            size += float(truth.square().sum())
    return (miss / size) ** 0.5


def without_times(plan):
    return {**plan.to_dict(), "note": {**plan.note, "environment": None, "seconds": None}}


# ---------------------------------------------------------------- the promise


@pytest.mark.parametrize("tolerance", [0.3, 0.05])
def test_the_whole_plan_stays_inside_the_tolerance_and_saves(model, batches, tolerance):
    plan = ca.tune(model, batches, tolerance, cost="multiply-adds")
    assert plan.layers
    assert plan.note["error"] <= tolerance
    assert plan.note["error"] == pytest.approx(output_error(model, batches, plan), rel=1e-4)
    lengths = [int(n) for batch in batches for n in batch["attention_mask"].sum(-1)]

    def cost(given):
        each = [given] * 4 if isinstance(given, ca.Method) else given
        return sum(one.cost(n, n, 8, 8) for one in each for n in lengths)

    names = list(ca.hf.layers(model))
    spent = sum(cost(plan.layers.get(name, ca.Exact())) for name in names)
    assert plan.note["cost_share"] == pytest.approx(spent / (2 * cost(ca.Exact())))
    assert plan.note["cost_share"] < 0.9
    assert [row["layer"] for row in plan.note["layers"]] == names
    assert model.config._attn_implementation == "sdpa"


def test_more_tolerance_never_costs_more_and_none_is_exact(model, batches, tmp_path):
    state = tmp_path / "state"
    shares = [
        ca.tune(model, batches, tolerance, methods=FEW, state=state, cost="multiply-adds").note["cost_share"]
        for tolerance in (0.001, 0.03, 0.1, 0.5)
    ]
    assert shares == sorted(shares, reverse=True)
    nothing = ca.tune(model, batches, 1e-9, methods=FEW, state=state, cost="multiply-adds")
    assert nothing.layers == {}
    assert (nothing.note["error"], nothing.note["cost_share"]) == (0, 1)
    assert all(row["method"] == "exact" for row in nothing.note["layers"])


def test_the_plan_can_be_kept_and_used(model, batches, tmp_path):
    plan = ca.tune(model, batches, 0.2, methods=FEW, cost="multiply-adds")
    kept = ca.Plan.load(plan.save(tmp_path / "plan.json"))
    assert kept.layers == plan.layers
    assert kept.note["tolerance"] == 0.2
    assert {"model", "error", "cost", "cost_share", "environment"} <= set(kept.note)
    report = ca.hf.swap(model, kept)
    ca.hf.restore(model)
    assert report.swapped == list(plan.layers)


def test_layers_can_be_left_out(model, batches):
    plan = ca.tune(model, batches, 0.3, methods=FEW, only=r"layer\.1\.", cost="multiply-adds")
    assert list(plan.layers) == ["encoder.layer.1.attention.self"]


def test_one_method_for_a_layer_when_heads_are_not_to_differ(model, batches):
    plan = ca.tune(model, batches, 0.05, methods=FEW, heads=False, cost="multiply-adds")
    assert all(isinstance(each, ca.Method) for each in plan.layers.values())
    assert plan.note["error"] <= 0.05


def test_causal_layers_get_strictly_causal_methods_unless_told():
    llama = tiny.llama(sharp=2.0)
    batches = [{"input_ids": torch.randint(60, (1, 250), generator=torch.Generator().manual_seed(0))}]
    candidates = [
        "refined:clusters=4,top=8,parts=1,slope=false,block=32,steps=2,start=random",
        "refined:clusters=4,top=8,parts=1,slope=false,block=32,steps=2,start=random,centroids_from=block",
        "smyrf:q_seats=16,k_seats=16",
    ]
    plan = ca.tune(llama, batches, 0.5, methods=candidates, heads=False, cost="multiply-adds")
    assert set(plan.layers) <= {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert plan.layers
    assert set(plan.layers.values()) == {ca.method(candidates[0])}
    assert plan.note["error"] == pytest.approx(output_error(llama, batches, plan), rel=1e-4)
    prefill = ca.tune(llama, batches, 0.5, methods=candidates[1:], strict=False, heads=False, cost="multiply-adds")
    assert prefill.layers


def test_time_is_measured_on_this_device(model, batches):
    plan = ca.tune(model, batches, 0.5, methods=["local:window=2", "refined:clusters=6,top=8"], cost="time")
    assert plan.note["cost"] == "time"
    assert plan.note["error"] <= 0.5
    assert plan.note["cost_share"] <= 1
    assert all(isinstance(each, ca.Method) for each in plan.layers.values())


def test_other_outputs_can_be_judged(batches):
    model = tiny.bert(kind="BertForSequenceClassification")
    plan = ca.tune(
        model, batches, 0.3, methods=FEW, output=lambda model, batch: model(**batch).logits, cost="multiply-adds"
    )
    with torch.no_grad():
        truth = torch.cat([model(**batch).logits for batch in batches])
        ca.hf.swap(model, plan)
        ours = torch.cat([model(**batch).logits for batch in batches])
    assert plan.note["error"] == pytest.approx(float((ours - truth).norm() / truth.norm()), rel=1e-3)


def test_an_encoder_decoder_with_nothing_to_decode_is_judged_by_its_encoder(tmp_path):
    import transformers

    model = transformers.WhisperForConditionalGeneration.from_pretrained(tiny.whisper(tmp_path / "whisper"))
    batches = [{"input_features": torch.randn(1, 80, 200, generator=torch.Generator().manual_seed(0))}]
    plan = ca.tune(model, batches, 0.3, methods=FEW, cost="multiply-adds")
    assert plan.layers
    assert all("encoder" in name and "decoder" not in name for name in plan.layers)


def test_kinds_of_calls_are_told_apart(tmp_path):
    """A method for self-attention alone is no candidate for the layers that look at another sequence."""
    import transformers

    model = transformers.WhisperForConditionalGeneration.from_pretrained(tiny.whisper(tmp_path / "whisper"))
    g = torch.Generator().manual_seed(0)
    spoken = torch.randn(1, 80, 200, generator=g)
    batches = [{"input_features": spoken, "decoder_input_ids": torch.randint(20, (1, 16), generator=g)}]
    plan = ca.tune(
        model, batches, 0.9, methods=["reformer:rounds=1,chunk=4", "refined:clusters=4,top=8"], cost="multiply-adds"
    )
    kinds = {row["layer"]: row["kind"] for row in plan.note["layers"]}
    assert set(kinds.values()) == {"self", "cross"}
    assert all((kind == "cross") == ("encoder_attn" in name) for name, kind in kinds.items())
    crossing = [plan.layers.get(name, ca.Exact()) for name, kind in kinds.items() if kind == "cross"]
    each = [one for given in crossing for one in (given if isinstance(given, tuple) else (given,))]
    assert not any(one.self_only for one in each)
    assert {"exact", "tuned"} <= set(plan.note["seconds"])


# ---------------------------------------------------------------- resuming


class Interrupted(Exception):
    pass


def test_an_interrupted_run_goes_on_and_ends_the_same(model, batches, tmp_path):
    whole = ca.tune(model, batches, 0.1, methods=FEW, cost="multiply-adds")
    passes = []

    def output(model, batch):
        passes.append(1)
        return model(**batch).last_hidden_state[batch["attention_mask"].bool()]

    state = tmp_path / "plan.json.state"
    steps = []

    def stop_after(count):
        def tick(text, total):
            steps.append(total)
            if len(steps) > count:
                raise Interrupted

        return tick

    with pytest.raises(Interrupted):
        ca.tune(model, batches, 0.1, methods=FEW, output=output, state=state, tick=stop_after(9), cost="multiply-adds")
    assert model.config._attn_implementation == "sdpa"  # also when it ends badly
    assert not model.training
    first, passes[:] = len(passes), []
    resumed = ca.tune(model, batches, 0.1, methods=FEW, output=output, state=state, cost="multiply-adds")
    second, passes[:] = len(passes), []
    assert without_times(resumed) == without_times(whole)
    again = ca.tune(model, batches, 0.1, methods=FEW, output=output, state=state, cost="multiply-adds")
    assert without_times(again) == without_times(whole)
    assert len(passes) == len(batches) < second  # only exact attention is looked at anew
    assert first > len(batches)


def test_steps_are_announced_and_never_exceeded(model, batches):
    seen = []
    ca.tune(model, batches, 0.1, methods=FEW, tick=lambda text, total: seen.append((text, total)), cost="multiply-adds")
    assert len(seen) <= seen[-1][1]
    assert any("encoder.layer.0" in text for text, _ in seen)


def test_measurements_of_another_model_are_not_mixed_in(model, batches, tmp_path):
    state = tmp_path / "state"
    ca.tune(model, batches, 0.1, methods=FEW, state=state, cost="multiply-adds")
    before = json.loads(state.read_text())["fingerprint"]
    other = tiny.bert(seed=1)
    fresh = ca.tune(other, batches, 0.1, methods=FEW, cost="multiply-adds")
    assert without_times(ca.tune(other, batches, 0.1, methods=FEW, state=state, cost="multiply-adds")) == without_times(
        fresh
    )
    assert json.loads(state.read_text())["fingerprint"] != before


# ---------------------------------------------------------------- choosing


def test_heads_differ_where_it_pays():
    """The cheap candidate serves head 0 well and head 1 badly."""
    cheap, dear = ca.Clustered(clusters=2), ca.Refined(clusters=8)
    layer = Layer(
        heads=2,
        candidates=[cheap, dear, ca.Exact()],
        miss=[[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
        size=[1.0, 1.0],
        cost=[1.0, 5.0, 10.0],
    )
    search = Search.__new__(Search)
    search.layers, search.by_head = {"it": layer}, True
    assert search._choose(layer, 1.0) == (cheap, dear)
    assert search._choose(layer, 1e-9) == cheap  # an error that costs nothing is no reason
    search.by_head = False
    assert search._choose(layer, 1.0) == dear
    layer.cost = [4.9, 5.0, 10.0]  # nearly nothing saved: one method for both
    search.by_head = True
    assert search._choose(layer, 1.0) == dear


def test_useless_candidates_are_forgotten():
    names = [ca.Clustered(clusters=c) for c in (2, 4, 8)]
    layer = Layer(
        heads=2,
        candidates=[*names, ca.Exact()],
        miss=[[3.0, 3.0], [4.0, 3.5], [1.0, 2.0], [0.0, 0.0]],
        size=[9.0, 9.0],
        cost=[1.0, 2.0, 3.0, 10.0],
    )
    Search._only_useful(layer)
    assert layer.candidates == [names[0], names[2], ca.Exact()]
    assert layer.cost == [1, 3, 10]


@pytest.mark.parametrize(
    "shape",
    [
        Shape(512, 512, 32, 32),
        Shape(1500, 1500, 64, 64),
        Shape(2048, 2048, 64, 64, True),
        Shape(2048, 2048, 64, 64, True, 3),
    ],
)
def test_the_usual_candidates_span_the_costs(shape):
    exact = multiply_adds(ca.Exact(), shape)
    shares = sorted(multiply_adds(each, shape) / exact for each in usual_candidates(shape))
    assert shares[0] < 0.15
    assert sum(share < 1 for share in shares) > 15
    if shape.causal:
        assert all(each.causality == "strict" for each in usual_candidates(shape))
        assert any(each.causality == "value" for each in usual_candidates(shape, strict=False))
        refined = [each for each in usual_candidates(shape) if isinstance(each, ca.Refined)]
        assert all(bool(each.share_heads) == (shape.group > 1) for each in refined)  # as sizes left open have it


def test_the_time_of_the_model_is_measured_and_exact_may_win(model, batches, monkeypatch):
    """By time, a plan that makes the model slower is no plan."""
    from clusterattn.tuning.bench import Bench

    for tuned, wins in ((2.0, True), (0.5, False)):
        monkeypatch.setattr(Bench, "seconds", lambda self, choice, tuned=tuned: {"exact": 1.0, "tuned": tuned})
        plan = ca.tune(model, batches, 0.5, methods=["local:window=2"], cost="multiply-adds")
        assert plan.note["seconds"] == {"exact": 1.0, "tuned": tuned}
        assert plan.layers
        by_time = ca.tune(model, batches, 0.5, methods=["local:window=2"])
        assert by_time.note["cost"] == "time"
        if wins:
            assert by_time.layers == {}
            assert by_time.note["exact_wins"]


def test_plans_hold_the_sizes_that_were_measured(model, batches):
    plan = ca.tune(model, batches, 0.5, methods=["refined"], cost="multiply-adds", heads=False)
    assert plan.layers
    assert all(each.clusters is not None for each in plan.layers.values())


# ---------------------------------------------------------------- refusals and the command


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tolerance": 0.0}, "tolerance between 0 and 1"),
        ({"tolerance": True}, "tolerance between 0 and 1"),
        ({"cost": "money"}, "time, multiply-adds"),
        ({"methods": []}, "at least one candidate"),
        ({"methods": ["nosuch"]}, "nosuch"),
        ({"only": "nothing"}, "ca.hf.layers(model)"),
        ({"batches": []}, "at least one batch"),
    ],
)
def test_bad_words_are_refused(model, batches, options, said):
    with pytest.raises(ValueError) as refused:
        ca.tune(model, **{"batches": batches, **options})
    assert said in str(refused.value)


def test_a_state_file_that_is_none_is_refused(model, batches, tmp_path):
    (tmp_path / "state").write_text("no state")
    with pytest.raises(ValueError, match="removing it"):
        ca.tune(model, batches, 0.1, methods=FEW, state=tmp_path / "state", cost="multiply-adds")


def test_the_command_writes_a_plan_and_its_state(tmp_path):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from clusterattn import cli

    def run(*words):
        return CliRunner().invoke(cli.build(), [str(word) for word in words])

    folder = tiny.saved(tmp_path / "bert", tiny.bert())
    data, out = tmp_path / "text.txt", tmp_path / "plan.json"
    data.write_text(tiny.text(600))
    candidates, inside = [word for each in FEW for word in ("--method", each)], ("--tolerance", 0.1)
    words = ("tune", folder, "--data", data, "--length", 128, "--limit", 2, *candidates, "--out", out, *inside)
    words = (*words, "--cost", "multiply-adds")
    shown = run(*words)
    assert shown.exit_code == 0, shown.output
    plan = ca.Plan.load(out)
    assert plan.note["error"] <= 0.1
    assert plan.note["model"] == folder
    assert "encoder.layer.0.attention.self" in shown.stdout
    assert re.search(r"\(tolerance 0\.1\) with [\d.]+% of exact attention's multiply-adds", shown.stdout)
    assert re.search(r"the model takes [\d.]+ ms with the plan, [\d.]+ ms with exact attention", shown.stdout)
    assert (tmp_path / "plan.json.state").is_file()
    told = json.loads(run(*words, "--json").stdout)
    assert told["layers"] == plan.to_dict()["layers"]
    refused = run("tune", folder, "--data", data, "--tolerance", 7)
    assert refused.exit_code == 2
    assert "tolerance between 0 and 1" in refused.stderr
