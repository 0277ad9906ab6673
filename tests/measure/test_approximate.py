"""`clusterattn approximate`: tiny random models through every task; what is reported must be what happened."""

from __future__ import annotations

import json
import math
import re
import wave

import pytest
import torch

import clusterattn as ca

pytest.importorskip("transformers")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")
import tiny_models as tiny
from typer.testing import CliRunner

from clusterattn import cli
from clusterattn.measure import cost, read, reading, tasks
from clusterattn.measure.approximate import approximate
from clusterattn.measure.cost import Shape


def run(*words):
    return CliRunner().invoke(cli.build(), [str(word) for word in words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def bert(folder):
    return tiny.saved(folder / "bert", tiny.bert())


@pytest.fixture
def lines(tmp_path):
    """Passages of unequal length: batches of them are padded."""
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(tiny.text(words, seed=words) for words in (90, 40, 100, 63)) + "\n")
    return path


def measured(task, model, data, given, **options):
    kind = tasks.task_named(task)
    loaded = tasks.load(kind, model)
    batches = kind.batches(loaded, data, length=options.pop("length", None), size=options.pop("size", None))
    methods = {str(each): each for each in map(ca.method, given)}
    return approximate(loaded, kind, batches, methods, **options), loaded, batches


# ---------------------------------------------------------------- what is reported


def test_hidden_error_and_cost_are_those_of_the_swapped_model(bert, lines):
    method = ca.Refined(clusters=6, top=8)
    result, loaded, (batch,) = measured("hidden", bert, lines, [method], size=4)
    exact, row = result.rows
    real = batch.inputs["attention_mask"].bool()
    with torch.no_grad():
        truth = loaded.model(**batch.inputs).last_hidden_state[real].double()
        ca.hf.swap(loaded.model, method)
        ours = loaded.model(**batch.inputs).last_hidden_state[real].double()
    assert row["error"] == pytest.approx(float((ours - truth).norm() / truth.norm()), rel=1e-5)
    assert row["value"] == row["error"] > 1e-3
    assert exact["error"] < 1e-6
    lengths = real.sum(-1).tolist()
    assert sorted(lengths) == [42, 65, 92, 102]
    share = sum(method.cost(n, n, 8, 8) for n in lengths) / sum(n * n * 16 for n in lengths)
    assert row["cost_share"] == pytest.approx(share)
    assert (exact["cost_share"], exact["speedup"], exact["difference"]) == (1, 1, 0)
    assert row["environment"]["transformers"]
    json.dumps(row)


def test_methods_near_exact_are_near_and_the_model_comes_back(bert, lines):
    result, loaded, _ = measured("hidden", bert, lines, ["refined:clusters=4,top=128", "clustered:clusters=2"], size=2)
    errors = {row["method"]: row["error"] for row in result.rows}
    assert errors["refined:clusters=4,top=128"] < 1e-4 < errors["clustered:clusters=2"]
    assert loaded.model.config._attn_implementation == "sdpa"
    for name, layers in result.heads.items():
        assert list(layers) == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
        for heads in layers.values():
            assert heads.shape == (4,)
            assert (heads < 1e-4).all() == (name != "clustered:clusters=2")


def test_maps_are_those_of_exact_attention_and_of_the_methods(bert, lines):
    result, _, _ = measured("hidden", bert, lines, ["clustered:clusters=3"], size=4)
    head = result.maps["encoder.layer.1.attention.self"]
    weights = head.weights()
    assert weights["exact"].shape == (92, 92)  # the first passage, without its padding
    torch.testing.assert_close(weights["exact"].sum(-1), torch.ones(92))
    assert len(weights["clustered:clusters=3"].unique(dim=0)) == 3
    assert len(weights["exact"].unique(dim=0)) == 92


def test_a_plan_and_an_expression_choose_layers(bert, lines):
    one = "encoder.layer.1.attention.self"
    plan = ca.Plan({one: "clustered:clusters=2"})
    kind = tasks.task_named("hidden")
    loaded = tasks.load(kind, bert)
    batches = kind.batches(loaded, lines)
    planned = approximate(loaded, kind, batches, {"plan mine": plan})
    chosen = approximate(loaded, kind, batches, {"a": ca.Clustered(clusters=2)}, only=r"layer\.1\.")
    everywhere = approximate(loaded, kind, batches, {"a": ca.Clustered(clusters=2)})
    assert planned.rows[1]["error"] == chosen.rows[1]["error"] != everywhere.rows[1]["error"]
    assert planned.rows[1]["cost_share"] == pytest.approx((1 + everywhere.rows[1]["cost_share"]) / 2)
    assert "1 of 2 attention layers stay exact (the plan does not name it)" in planned.notes[0]
    exactly = approximate(loaded, kind, batches, {"a": ca.Clustered(clusters=2)}, exact_below=1000)
    assert exactly.rows[1]["error"] < 1e-6
    assert exactly.rows[1]["cost_share"] == 1
    with pytest.raises(ValueError, match=r"--layers that finds one of encoder\.layer\.0"):
        approximate(loaded, kind, batches, {"a": ca.Clustered(clusters=2)}, only="nothing like it")


# ---------------------------------------------------------------- tasks


def test_embeddings_are_compared_by_cosine(bert, lines):
    result, loaded, (batch,) = measured("embed", bert, lines, ["clustered:clusters=2"], size=4)
    real = batch.inputs["attention_mask"].unsqueeze(-1)

    def embedded():
        with torch.no_grad():
            hidden = loaded.model(**batch.inputs).last_hidden_state
        return (hidden * real).sum(1) / real.sum(1)

    truth = embedded()
    ca.hf.swap(loaded.model, "clustered:clusters=2")
    distance = 1 - torch.cosine_similarity(embedded().double(), truth.double(), dim=-1)
    assert result.rows[1]["value"] == pytest.approx(float(distance.mean()), rel=1e-3)
    assert result.rows[0]["value"] < 1e-9


def test_a_language_model_is_judged_by_perplexity(folder, tmp_path):
    model = tiny.llama()
    path = tiny.saved(folder / "llama", model, marks=False)
    book = tmp_path / "book.txt"
    book.write_text(tiny.text(1000))
    result, loaded, batches = measured("lm", path, book, ["refined:clusters=4,top=4,block=32"], length=128)
    assert [batch.inputs["input_ids"].shape for batch in batches] == [(1, 128)] * 7  # the last, short one is left out
    with torch.no_grad():
        losses = [model(**batch.inputs, labels=batch.inputs["input_ids"]).loss for batch in batches]
    exact, row = result.rows
    assert exact["value"] == pytest.approx(math.exp(torch.stack(losses).mean()), rel=1e-4)
    assert exact["figures"]["KL to exact, nats"] < 1e-6 < row["figures"]["KL to exact, nats"]
    assert row["difference"] == row["value"] - exact["value"] != 0
    shared = model.config.num_attention_heads // model.config.num_key_value_heads
    assert row["cost_share"] == pytest.approx(
        cost.share(ca.Refined(clusters=4, top=4, block=32), Shape(128, 128, 8, 8, True, shared))
    )


def test_classification_counts_what_is_right(folder, tmp_path):
    names = {0: "bad", 1: "good"}
    model = tiny.bert(kind="BertForSequenceClassification", id2label=names, label2id={"bad": 0, "good": 1})
    path = tiny.saved(folder / "classifier", model)
    passages = [tiny.text(60, seed) for seed in range(6)]
    made = tiny.tokenizer()(passages, padding=True, return_tensors="pt")
    with torch.no_grad():
        told = model(input_ids=made["input_ids"], attention_mask=made["attention_mask"]).logits.argmax(-1).tolist()
    names = [("bad", "good")[i] for i in told]
    names[0] = "good" if names[0] == "bad" else "bad"  # one label that the model gets wrong
    names[1] = str(told[1])  # numbers do too
    data = tmp_path / "reviews.tsv"
    data.write_text("".join(f"{name}\t{passage}\n" for name, passage in zip(names, passages, strict=True)))
    result, _, _ = measured("classify", path, data, ["refined:clusters=4,top=64"], size=2)
    assert [row["value"] for row in result.rows] == [pytest.approx(5 / 6)] * 2
    assert result.rows[1]["figures"]["same label as exact"] == 1
    data.write_text('{"text": "w1 w2", "label": "good"}\n')
    other = data.rename(tmp_path / "reviews.jsonl")
    assert reading.passages(other, whole=False, labelled=True)[0].label == "good"
    data.write_text("great\tw1 w2\n")
    with pytest.raises(ValueError, match="a label of the model: bad, good, or 0 to 1; got 'great'"):
        measured("classify", path, data, [])


@pytest.mark.parametrize("make", [tiny.wav2vec2, tiny.whisper])
def test_speech_is_judged_by_its_words(make, folder, tmp_path):
    clips = tiny.clips(tmp_path / "clips", {"one": "w1 w2 w3", "two": "w52"})
    path = make(folder / make.__name__)
    result, loaded, batches = measured("asr", path, clips, ["clustered:clusters=2"], only="encoder")
    exact, row = result.rows
    kind = tasks.task_named("asr")
    with torch.no_grad():
        said = [kind.answer(loaded, batch).output[0] for batch in batches]
    wrong = sum(tasks.word_edits([words], [got])[0] for words, got in zip(["w1 w2 w3", "w52"], said, strict=True))
    assert exact["value"] == pytest.approx(wrong / 4)
    assert exact["figures"]["words changed against exact"] == 0
    assert row["error"] > 1e-3
    assert all("encoder" in name for name in result.heads["clustered:clusters=2"])
    assert exact["sequences"] == 2


def test_edits_are_words_to_change():
    assert tasks.word_edits(["a b c", "d"], ["a x c y", ""]) == (3, 4)
    assert tasks.word_edits([""], ["one two"]) == (2, 0)
    assert tasks.plain_words("Don't, STOP -- now!", None) == "don't stop now"


# ---------------------------------------------------------------- reading


def test_sound_is_read_and_resampled(tmp_path):
    path = tmp_path / "two.wav"
    rate, time = 8000, torch.arange(4000) / 8000
    tone = torch.sin(2 * math.pi * 440 * time)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((torch.stack([tone, tone], -1) * 16384).to(torch.int16).numpy().tobytes())
    sound, found = reading.read_wav(path)
    assert found == 8000
    torch.testing.assert_close(sound, tone / 2, atol=1e-4, rtol=0)
    finer = reading.resampled(sound, 8000, 16000)
    want = torch.sin(2 * math.pi * 440 * torch.arange(8000) / 16000) / 2
    torch.testing.assert_close(finer, want, atol=2e-3, rtol=0)


def test_examples_are_taken_evenly():
    assert reading.spread(list(range(10)), 2) == [2, 7]
    assert reading.spread([1, 2], None) == reading.spread([1, 2], 5) == [1, 2]


@pytest.mark.parametrize(
    ("name", "content", "labelled", "said"),
    [
        ("a.tsv", "no tab here\n", True, "label<tab>text on every line in a.tsv, line 1"),
        ("a.jsonl", "{]\n", False, "one JSON object in a.jsonl, line 1"),
        ("a.jsonl", '{"words": 1}\n', False, 'an object with a "text" in a.jsonl, line 1; got words'),
        ("a.jsonl", '{"text": "w1"}\n', True, 'a "label" with every text in a.jsonl, line 1'),
        ("a.txt", "\n\n", False, "at least one passage"),
    ],
)
def test_bad_text_is_refused(tmp_path, name, content, labelled, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as refused:
        reading.passages(tmp_path / name, whole=False, labelled=labelled)
    assert said in str(refused.value)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_text_is_read_in_any_common_encoding(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("naïve words\nmore\n", encoding=encoding)
    assert [each.text for each in reading.passages(tmp_path / "a.txt", whole=False)] == ["naïve words", "more"]


def test_bad_sound_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"without any \.wav"):
        reading.speech(tmp_path)
    clips = tiny.clips(tmp_path / "clips", {"one": "w1"})
    (clips / "one.txt").unlink()
    with pytest.raises(ValueError, match=r"one\.wav without a transcript"):
        reading.speech(clips)
    (clips / "transcripts.tsv").write_text("one\tw1 w2\n")
    assert reading.speech(clips)[0].text == "w1 w2"
    (clips / "one.wav").write_text("no sound")
    with pytest.raises(ValueError, match=r"a PCM \.wav file"):
        reading.speech(clips)


# ---------------------------------------------------------------- cost


def test_causal_exact_attention_costs_what_the_mask_leaves():
    assert cost.multiply_adds(ca.Exact(), Shape(4, 4, 3, 5, causal=True)) == 10 * 8
    assert cost.multiply_adds(ca.Exact(), Shape(2, 5, 3, 5, causal=True)) == (4 + 5) * 8
    assert cost.multiply_adds(ca.Exact(), Shape(4, 4, 3, 5)) == 16 * 8


def test_causal_blocks_cost_themselves_and_their_centroids():
    method = ca.Refined(clusters=2, top=3, block=8, steps=1, start="random", centroids_from="block")
    d = e = 4
    own = (8 * 8 + 8 * 8 + 4 * 4) * (d + e)
    covariance = 16 * d * d  # of the 16 keys before the last block, each once
    grouping = [size * 2 * d + size * d + 2 * d * d for size in (8, 4)]  # assignment, means, S c
    centroids = [2 * keys * (d + e + d) for keys in (8, 16)]
    near = [size * 4 * (d + e) for size in (8, 4)]
    found = cost.multiply_adds(method, Shape(20, 20, d, e, causal=True))
    assert found == own + covariance + sum(grouping) + sum(centroids) + sum(near)


def test_each_head_costs_what_its_method_costs():
    one, other = ca.Refined(clusters=4, top=4), ca.Exact()
    at = [Shape(50, 50, 8, 8), Shape(30, 30, 8, 8)]
    together = cost.of_layer((one, other, one), 3, at)
    assert together == sum(2 * one.cost(n, n, 8, 8) + other.cost(n, n, 8, 8) for n in (50, 30))
    assert cost.of_layer(one, 1, at, exact_below=40) == one.cost(50, 50, 8, 8) + other.cost(30, 30, 8, 8)


# ---------------------------------------------------------------- the command


def test_the_command_writes_one_page_that_needs_nothing_else(bert, lines, tmp_path):
    out = tmp_path / "report"
    methods = ("--method", "refined:clusters=6,top=8", "--method", "clustered:clusters=6")
    shown = run("approximate", bert, "--task", "embed", "--data", lines, *methods, "--out", out)
    assert shown.exit_code == 0, shown.output
    assert "cosine distance" in shown.stdout
    assert "hidden-state error" in shown.stdout
    page = (out / "report.html").read_text()
    pictures = {"tradeoff.png", "heat.png", "maps.png"}
    assert {each.name for each in out.iterdir()} == {"report.html", "rows.jsonl", *pictures}
    assert page.count("data:image/png;base64,") == 3
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!data:)[a-z/]""", page)
    assert "http" not in page
    rows = read(out / "rows.jsonl")
    assert [row["method"] for row in rows] == ["exact", "refined:clusters=6,top=8", "clustered:clusters=6"]
    assert {"value", "difference", "error", "cost_share", "speedup", "task", "metric", "model"} <= set(rows[1])


def test_json_is_all_there_is_on_stdout_and_usual_methods_follow_the_length(bert, lines, tmp_path):
    plan = tmp_path / "plan.json"
    ca.Plan({"encoder.layer.0.attention.self": "local:window=8"}).save(plan)
    words = ("approximate", bert, "--data", lines, "--limit", 2, "--no-report", "--json")
    rows = json.loads(run(*words).stdout)
    assert [row["name"] for row in rows] == ["exact", "clustered", "improved", "refined"]
    assert rows[1]["settings"]["clusters"] < 10
    assert rows[0]["sequences"] == 2
    rows = json.loads(run(*words, "--plan", plan).stdout)
    assert [row["method"] for row in rows] == ["exact", "plan plan"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{bert}", "--task", "poetry", "--data", "{lines}"], ["--task hidden or embed", "poetry"]),
        (["{bert}", "--data", "not/there.txt"], ["which is not there"]),
        (["/no/such/model", "--data", "{lines}"], ["the folder of a model or a hub id"]),
        (["{bert}", "--task", "asr", "--data", "{lines}"], ["which is no folder"]),
        (["{bert}", "--data", "{lines}", "--method", "nosuch"], ["nosuch"]),
        (["{bert}", "--data", "{lines}", "--method", "exact"], ["exact itself"]),
        (["{bert}", "--data", "{lines}", "--plan", "{lines}"], ["a plan as JSON"]),
        (["{bert}", "--task", "classify", "--data", "{lines}"], ["label<tab>text"]),
        (["{bert}", "--task", "lm", "--data", "{lines}"], ["weights for all of BertLMHeadModel", "never trained"]),
        (["{empty}", "--data", "{lines}"], ["without config.json"]),
    ],
)
def test_bad_words_are_refused_in_one_sentence(bert, lines, tmp_path, words, said):
    places = {"{bert}": bert, "{lines}": lines, "{empty}": tmp_path}
    shown = run("approximate", *(places.get(word, word) for word in words), "--no-report")
    assert shown.exit_code == 2, shown.output
    assert shown.stdout == ""
    assert shown.stderr.strip().startswith("error: ")
    assert "; try " in shown.stderr
    for each in said:
        assert each in shown.stderr


def test_code_from_a_model_folder_never_runs(tmp_path, lines):
    """A folder that asks for its own code is refused, and pickles are read without running them."""
    evil = tmp_path / "evil"
    tiny.saved(evil, tiny.bert())
    config = json.loads((evil / "config.json").read_text())
    config.update(model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})
    (evil / "config.json").write_text(json.dumps(config))
    (evil / "evil.py").write_text("raise SystemExit('it ran')\n")
    shown = run("approximate", evil, "--data", lines, "--no-report")
    assert shown.exit_code == 2
    assert "that transformers can load" in shown.stderr

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    pickled = tmp_path / "pickled"
    tiny.saved(pickled, tiny.bert())
    (pickled / "model.safetensors").unlink()
    torch.save({"embeddings.word_embeddings.weight": Trap()}, pickled / "pytorch_model.bin")
    shown = run("approximate", pickled, "--data", lines, "--no-report")
    assert shown.exit_code == 2, shown.output
    assert not (tmp_path / "ran").exists()
