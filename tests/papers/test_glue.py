"""Sentences for pretrained models: files as they were published, figures by hand, models trained with any method."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason='needs the extra "train"')
pytest.importorskip("accelerate", reason='needs the extra "train"')

from clusterattn import _report
from clusterattn_papers.models import Answer
from clusterattn_papers.models.pretrained import Pretrained, answering_with, encoder, tiny
from clusterattn_papers.tasks import batches, glue
from clusterattn_papers.tasks.glue import INVENTED, PIECES, Glue, Text, answers, opened
from clusterattn_papers.train import Settings, fit, judge

EVERY = ["exact", "clustered:clusters=3", "improved:clusters=3,top=4",
         "refined:clusters=3,top=4,parts=1,slope=false,steps=5",
         "smyrf:rounds=2,q_seats=4,k_seats=4", "smyrf:rounds=2,q_seats=4,k_seats=4,transform=e2lsh",
         "smyrf:rounds=2,q_seats=4,k_seats=4,transform=crosspolytope"]  # fmt: skip


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny(tmp_path_factory.mktemp("tiny"), INVENTED, positions=64)


def task(weights: str, name: str = "cola", train: int = 32, length: int = 64) -> Glue:
    piece = PIECES[name]
    return Glue(piece, glue.invented(piece, {"train": train, "dev": 16, "test": 16}, 64, 0), weights, length=length)


# ------------------------------------------------------------------------------------------------ files


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_cola_has_its_label_second_and_its_sentence_last(tmp_path: Path) -> None:
    for file in ("train", "val", "dev"):
        write(tmp_path / f"cola/{file}.tsv", f'gj04\t1\t\tFine {file}.\ngj04\t0\t*\tNot it is "fine.\n')
    found = PIECES["cola"].read(tmp_path, 0)
    assert found["test"] == [Text("Fine dev.", None, 1.0), Text('Not it is "fine.', None, 0.0)]
    assert found["dev"][0].first == "Fine val."


def test_headers_are_no_examples_and_words_are_labels(tmp_path: Path) -> None:
    head = "index\tsentence1\tsentence2\tlabel\n"
    rows = "".join(f"{i}\tIt rains {i}.\tIt is wet.\t{'not_' * (i % 2)}entailment\n" for i in range(20))
    write(tmp_path / "rte/train.tsv", head + rows)
    write(tmp_path / "rte/dev.tsv", head + "0\tIt rains.\tIt is dry.\tnot_entailment\n")
    found = PIECES["rte"].read(tmp_path, 0)
    assert found["test"] == [Text("It rains.", "It is dry.", 0.0)]
    assert (len(found["train"]), len(found["dev"])) == (18, 2)
    assert not {each.first for each in found["train"]} & {each.first for each in found["dev"]}
    assert sorted(each.label for each in found["train"] + found["dev"]) == [0.0] * 10 + [1.0] * 10


def test_inference_in_three_labels_by_number_and_by_word(tmp_path: Path) -> None:
    pairs = "".join(f"premise {i // 3}\thypothesis {i}\t{i % 3}\n" for i in range(60))
    write(tmp_path / "data/snli/dev.txt", pairs)
    write(tmp_path / "data/snli/test.txt", "A man sleeps\tA man is awake\t2\n")
    found = PIECES["snli"].read(tmp_path, 0)
    assert found["test"] == [Text("A man sleeps", "A man is awake", 2.0)]
    assert {each.label for each in found["train"]} == {0.0, 1.0, 2.0}
    assert not {each.first for each in found["train"]} & {each.first for each in found["dev"]}  # a premise, one side
    columns = ["index", "promptID", "pairID", "genre", "p", "q", "r", "s", "sentence1", "sentence2", "gold_label"]
    rows = [[*map(str, range(8)), f"one {i}", "two", "entailment"] for i in range(100)]
    for name, label in (("train", ""), ("dev_matched", "neutral"), ("dev_mismatched", "contradiction")):
        lines = [columns, *([*row[:-1], label or row[-1]] for row in rows)]
        write(tmp_path / f"MNLI/{name}.tsv", "".join("\t".join(line) + "\n" for line in lines))
    matched, mismatched = (PIECES[name].read(tmp_path / "MNLI", 0) for name in ("mnli", "mnli-mm"))
    assert matched["test"][0] == Text("one 0", "two", 1.0)
    assert mismatched["test"][0] == Text("one 0", "two", 2.0)
    assert (len(matched["train"]), len(matched["dev"])) == (98, 2)
    assert matched["train"][0].label == 0.0


def test_wnli_mixes_files_with_and_without_a_header(tmp_path: Path) -> None:
    write(tmp_path / "wnli/train.tsv", "index\tsentence1\tsentence2\tlabel\n1\ta\tb\t1\n")
    write(tmp_path / "wnli/val.tsv", "0\tc\td\t0\n")
    write(tmp_path / "wnli/dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\te\tf\t1\n")
    found = PIECES["wnli"].read(tmp_path, 0)
    assert found == {"train": [Text("a", "b", 1.0)], "dev": [Text("c", "d", 0.0)], "test": [Text("e", "f", 1.0)]}


def test_one_question_never_stands_on_two_sides(tmp_path: Path) -> None:
    rows = [f"{i}\tquestion {i // 2}?\tsentence {i}\t{'not_' * (i % 2)}entailment\n" for i in range(100)]
    write(tmp_path / "qnli/dev.tsv", "index\tquestion\tsentence\tlabel\n" + "".join(rows))
    found = PIECES["qnli"].read(tmp_path, 0)
    assert {split: len(some) for split, some in found.items()} == {"train": 80, "dev": 10, "test": 10}
    asked = [{each.first for each in some} for some in found.values()]
    assert sum(map(len, asked)) == 50 == len(set.union(*asked))
    assert PIECES["qnli"].read(tmp_path, 0) == found
    assert PIECES["qnli"].read(tmp_path, 1) != found


def test_pairs_scores_and_sentences(tmp_path: Path) -> None:
    write(tmp_path / "data/mrpc/train.txt", "".join(f"one {i} .\tother {i} .\t{i % 2}\n" for i in range(10)))
    write(tmp_path / "data/mrpc/test.txt", "it 's\tit is\t1\n")
    found = PIECES["mrpc"].read(tmp_path, 0)
    assert found["test"] == [Text("it 's", "it is", 1.0)]
    assert (len(found["train"]), len(found["dev"])) == (9, 1)
    for split in ("train", "dev", "test"):
        write(tmp_path / f"sts-{split}.csv", 'main-news\tMSRpar\t2012\t0001\t2.500\tA "b.\tC d.\tsource\tnobody\n')
        write(tmp_path / f"data/stsa.binary.{split}", "1 a stirring , funny film\n0 crème brûlée\n")
    assert PIECES["stsb"].read(tmp_path, 0)["dev"] == [Text('A "b.', "C d.", 0.5)]
    assert PIECES["sst2"].read(tmp_path, 0)["test"][1] == Text("crème brûlée", None, 0.0)


def test_reviews_and_articles(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for i in range(10):
            write(tmp_path / f"aclImdb/{part}/{('neg', 'pos')[i % 2]}/{i}_7.txt", f"Bad.<br /><br />{part} {i}")
    found = PIECES["imdb"].read(tmp_path, 0)
    assert {split: len(some) for split, some in found.items()} == {"train": 9, "dev": 1, "test": 10}
    assert found["test"][0] == Text("Bad.  test 0", None, 0)
    assert [each.label for each in found["test"]] == [0] * 5 + [1] * 5
    articles = "".join(
        f'<article id="{i}" title="T{i}"><p>One &amp; <a href="x">two</a></p>\n<p>three.</p></article>'
        for i in range(20)
    )
    truths = "".join(f'<article hyperpartisan="{"true" if i % 2 else "false"}" id="{i}"/>' for i in range(20))
    write(tmp_path / "articles-training.xml", f"<articles>{articles}</articles>")
    write(tmp_path / "ground-truth-training.xml", f"<articles>{truths}</articles>")
    found = PIECES["hyperpartisan"].read(tmp_path, 0)
    assert {split: len(some) for split, some in found.items()} == {"train": 16, "dev": 2, "test": 2}
    every = [text for some in found.values() for text in some]
    assert Text("T3. One & two three.", None, 1.0) in every
    assert sum(text.label for text in every) == 10


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    write(tmp_path / "wnli/train.tsv", "1\ta\tb\tmaybe\n")
    with pytest.raises(ValueError, match=r"wanted .*train\.tsv, line 1.*try"):
        PIECES["wnli"].read(tmp_path, 0)


# ------------------------------------------------------------------------------------------------ figures


def test_figures_by_hand() -> None:
    told, truth = torch.tensor([1, 1, 1, 0, 0, 0, 0, 1]), torch.tensor([1, 1, 0, 0, 0, 1, 1, 1])
    # 3 hits, 1 false alarm, 2 missed, 2 rightly left: (3*2 - 1*2) / sqrt(4 * 5 * 3 * 4)
    assert glue.pearson(told, truth) == pytest.approx(4 / 240**0.5)
    assert glue.f1(told, truth) == pytest.approx(2 * 3 / (4 + 5))
    assert glue.pearson(torch.ones(3), torch.tensor([1, 2, 3])) == 0.0
    x, y = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 4.0, 9.0, 16.0])
    assert glue.pearson(x, y) == pytest.approx(25 / (5 * 129) ** 0.5)
    assert glue.spearman(x, y) == pytest.approx(1.0)
    assert glue.ranks(torch.tensor([5.0, 1.0, 5.0, 7.0])).tolist() == [2.5, 1.0, 2.5, 4.0]


def test_the_score_is_the_piece_s_own_measure(weights: str) -> None:
    cola, stsb = task(weights, "cola"), task(weights, "stsb")
    said_so, labels = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 2.0]]), torch.tensor([1, 0, 0, 1])
    found = cola.figures(said_so, labels)
    assert found["accuracy"] == 0.75
    assert found["score"] == found["matthews"] == pytest.approx(2 / 12**0.5)
    numbers = stsb.figures(torch.tensor([[0.1], [0.2], [0.9]]), torch.tensor([0.0, 0.1, 0.8]))
    assert numbers["score"] == numbers["pearson"] == pytest.approx(1.0)
    assert cola.alike(said_so, said_so.flip(0)) == 0.5


# ------------------------------------------------------------------------------------------------ the model


def test_pairs_are_told_apart_and_cut_to_length(weights: str) -> None:
    made = task(weights, "mrpc", length=16)
    assert max(map(made.length, made.splits["train"])) == 16
    one = made.splits["test"][0]
    assert made.tokenizer.convert_ids_to_tokens(one.ids.tolist()).count("[SEP]") == 2
    assert one.kinds is not None
    assert set(one.kinds.tolist()) == {0, 1}
    batch = made.collate(made.splits["test"][:3])
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    assert batch["attention_mask"].sum(1).tolist() == [made.length(each) for each in made.splits["test"][:3]]


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("pool", ["first", "mean"])
def test_padding_changes_nothing(weights: str, method: str, pool: str) -> None:
    made = task(weights)
    torch.manual_seed(0)
    model = made.model(method, pool=pool).eval()
    some = made.splits["test"][:6]
    together = answers(model, [made.collate(some)])[0]
    alone = torch.cat([answers(model, [made.collate([each])])[0] for each in some])
    assert torch.allclose(together, alone, atol=1e-4)


@pytest.mark.parametrize("method", EVERY)
def test_every_method_trains(weights: str, method: str, caplog: pytest.LogCaptureFixture) -> None:
    _report._logged.cache_clear()
    caplog.set_level(logging.INFO, logger="clusterattn")
    made = task(weights)
    torch.manual_seed(0)
    model = made.model(method).train()
    assert model.encoder.config.attention_probs_dropout_prob == 0.0
    loss, count = made.loss(model, next(batches(made, "train", 32)))
    assert int(count) == 32
    loss.backward()
    for name, weight in model.named_parameters():
        if ".query.weight" in name or ".value.weight" in name or "head" in name:
            assert weight.grad is not None, name
            assert float(weight.grad.abs().sum()) > 0, name
    assert "stays exact" not in caplog.text


def test_fine_tuning_learns_and_the_loop_keeps_the_best(weights: str) -> None:
    made = task(weights, train=64)
    torch.manual_seed(0)
    fitted = fit(
        made,
        made.model("refined:clusters=4,top=8"),
        Settings(epochs=6, batch=8, lr=2e-3, optimizer="adamw"),
        device="cpu",
    )
    assert fitted.best["accuracy"] >= 0.75
    assert judge(made, fitted.model, "dev") == pytest.approx(fitted.best)


def test_numbers_are_learned_too(weights: str) -> None:
    made = task(weights, "stsb")
    torch.manual_seed(0)
    model = made.model("exact")
    loss, count = made.loss(model.eval(), next(batches(made, "train", 4)))
    logits, labels = answers(model, [next(batches(made, "train", 4))])
    assert float(loss.detach()) == pytest.approx(float((logits[:, 0].detach() - labels).square().sum()), rel=1e-5)
    assert int(count) == 4


def test_a_number_s_loss_has_the_method_s_own_too(weights: str) -> None:
    class Answers(torch.nn.Module):
        def forward(self, **_: Tensor) -> Answer:
            return Answer(torch.zeros(4, 1), torch.tensor(0.5))

    made = task(weights, "stsb")
    batch = next(batches(made, "train", 4))
    loss, _ = made.loss(Answers(), batch)
    assert float(loss) == pytest.approx(float(batch["labels"].square().sum()) + 0.5 * 4)


def test_a_model_says_what_it_attends_with(weights: str) -> None:
    told = {
        repr(task(weights).model(method, pool=pool))
        for method in ("exact", "clustered:clusters=2")
        for pool in ("first", "mean")
    }
    assert len(told) == 4


def test_another_attention_for_a_while(weights: str) -> None:
    made = task(weights)
    torch.manual_seed(0)
    model = made.model("exact").eval()
    assert isinstance(model, Pretrained)
    batch = made.collate(made.splits["test"])

    def answer() -> Tensor:
        with torch.no_grad():
            return answers(model, [batch])[0]

    before, state = answer(), {name: each.clone() for name, each in model.state_dict().items()}
    with answering_with(model, "clustered:clusters=1"):
        assert not torch.allclose(answer(), before, atol=1e-4)
    with answering_with(model, "improved:clusters=2,top=64"):
        assert torch.allclose(answer(), before, atol=1e-4)
    assert torch.equal(answer(), before)
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())


def test_only_whole_safetensors_are_loaded(weights: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(weights) / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"wanted a model whose weights are safetensors; got .*; try"):
        encoder(tmp_path)
    made = encoder(weights)
    partly = {name: each for name, each in made.state_dict().items() if "layer.1." not in name}
    (tmp_path / "part").mkdir()
    made.save_pretrained(tmp_path / "part", state_dict=partly)
    with pytest.raises(ValueError, match=r"wanted weights for all of BertModel; got .*layer\.1\."):
        encoder(tmp_path / "part")


def test_weights_are_found_by_either_name(weights: str, tmp_path: Path) -> None:
    assert glue.weights_of(None, "org/model") == "org/model"
    with pytest.raises(ValueError, match="wanted all-MiniLM-L6-v2 under --data"):
        glue.weights_of(tmp_path, "all-MiniLM-L6-v2")
    (tmp_path / "minilm").mkdir()
    with pytest.raises(ValueError, match="without config"):
        glue.weights_of(tmp_path, "all-MiniLM-L6-v2")
    (tmp_path / "minilm" / "config.json").write_text("{}")
    assert glue.weights_of(tmp_path, "all-MiniLM-L6-v2") == str(tmp_path / "minilm")


def test_a_piece_opens_from_a_data_folder(weights: str, tmp_path: Path) -> None:
    for file in ("train", "val", "dev"):
        write(tmp_path / f"glue-small/cola/{file}.tsv", "gj04\t1\t\tban dor\n" * 10)
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(weights)
    made = opened("cola", tmp_path, "all-MiniLM-L6-v2", tmp_path, limits={"train": 4})
    assert {split: len(some) for split, some in made.splits.items()} == {"train": 4, "dev": 10, "test": 10}
    assert made.tokenizer.decode(made.splits["test"][0].ids) == "[CLS] ban dor [SEP]"
