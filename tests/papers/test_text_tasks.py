"""Texts and pairs: every form of data is read right, figures are those of a hand, padding changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("safetensors")

import numpy
from reviews import reviews

from clusterattn_papers.reproduce import _texts
from clusterattn_papers.reproduce._texts import SAYS, spec
from clusterattn_papers.tasks.files import folder_of, inside
from clusterattn_papers.tasks.labelled_files import divided, read_splits, records
from clusterattn_papers.tasks.pairs import Pairs, Ranking, ranked
from clusterattn_papers.tasks.text import Classify
from clusterattn_papers.tasks.text_sets import pair_set, text_set
from clusterattn_papers.tasks.vocabulary import UNKNOWN, Vectors, Vocabulary, words_of
from clusterattn_papers.train import Settings, fit, judge, load, save

TEXT, PAIR = ("text", "label"), ("text_a", "text_b", "label")
METHODS = [spec(method, mean=9, clusters=3) for method in SAYS]


def written(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def a_file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def counts(splits: dict[str, Any]) -> list[int]:
    return [len(splits[split]) for split in ("train", "dev", "test")]


def as_csv(rows: list[tuple[str, ...]], *head: str) -> str:
    return "\n".join(",".join(f'"{field}"' for field in row) for row in [*([head] if head else []), *rows]) + "\n"


# ---------------------------------------------------------------------------------------------------- words


def test_words_are_lower_case_with_punctuation_and_clitics_apart() -> None:
    assert words_of("Don’t stop, it's 9am!") == ["do", "n't", "stop", ",", "it", "'s", "9am", "!"]
    assert words_of("  ") == []


def test_a_vocabulary_keeps_the_most_frequent_and_survives_a_file(tmp_path: Path) -> None:
    words = Vocabulary.of([["a", "b", "a"], ["c", "a", "b"]], most=2, also=["zoë"])
    assert [words.words[at] for at in words.numbers(["a", "b", "zoë"])] == ["a", "b", "zoë"]
    assert words.numbers(["c"]).tolist() == [UNKNOWN]
    assert words.numbers([]).tolist() == [UNKNOWN]
    words.save(tmp_path / "words.json")
    assert Vocabulary.load(tmp_path / "words.json") == words


def test_published_vectors_are_the_start_of_the_words_they_have(tmp_path: Path) -> None:
    values = numpy.arange(6, dtype="float16").reshape(3, 2)
    numpy.savez(tmp_path / "v.npz", vectors=values, words="not\ngood\nlovely")
    vectors = Vectors.load(tmp_path / "v.npz")
    rows = {"train": [("good plot", "1"), ("n't n't", "0")], "dev": [("lovely odd", "1")]}
    task = Classify(rows, vectors=vectors)
    assert "lovely" in task.vocabulary.index
    assert "odd" not in task.vocabulary.index
    table = task.model("exact", dim=8, heads=2).reader.words.weight  # type: ignore[union-attr]
    for word, row in (("good", 1), ("lovely", 2), ("n't", 0)):
        assert table[task.vocabulary.index[word]].tolist() == values[row].tolist()
    numpy.savez(tmp_path / "w.npz", vectors=values, words="one")
    with pytest.raises(ValueError, match="1 words, 3 vectors"):
        Vectors.load(tmp_path / "w.npz")


# ---------------------------------------------------------------------------------------------------- a user's files

ROWS = [("fine, really", "good"), ('it was "bad"', "bad")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'text,label\n"fine, really",good\n"it was ""bad""",bad\n'),
        ("a.csv", '\ufeffLabel,id,Text\r\ngood,1,"fine, really"\r\nbad,2,"it was ""bad"""\r\n'),
        ("a.csv", 'good,"fine, really"\nbad,"it was ""bad"""\n' * 3),
        ("a.tsv", 'review\tsentiment\nfine, really\tgood\nit was "bad"\tbad\n'),
        ("a.jsonl", '{"text": "fine, really", "label": "good"}\n\n{"label": "bad", "text": "it was \\"bad\\""}\n'),
    ],
)
def test_files_are_read_with_a_header_or_without(tmp_path: Path, name: str, content: str) -> None:
    found = records(a_file(tmp_path, name, content), TEXT)
    assert found[:2] == ROWS
    assert set(found) == set(ROWS)


def test_a_field_may_hold_a_book_and_many_lines(tmp_path: Path) -> None:
    book = "word\n" * 100_000
    path = a_file(tmp_path, "a.csv", f'text,label\n"{book}",long\nshort one,short\n')
    (text, label), _ = records(path, TEXT)
    assert text == book
    assert label == "long"
    with pytest.raises(ValueError, match="line 100003"):
        records(a_file(tmp_path, "a.csv", f'text,label\n"{book}",long\nno label\n'), TEXT)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "text,label\nfine,good\nbad\n", "line 3"),
        ("a.csv", "text,label\nfine,good\n ,bad\n", "line 3.*nothing there"),
        ("a.csv", "text,label\nfine,good\nbad,\n", "a label in a.csv, line 3"),
        ("a.csv", "a,b,c\n1,2,3\n", "columns named text, label.*a, b, c"),
        ("a.csv", "words,stars\n" + "fine,1\nnot so,2\n" * 20, "words, stars"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": \n', "line 2"),
        ("a.jsonl", '{"text": "x"}\n', "keys text, label.*line 1.*got text"),
        ("a.jsonl", "[1]\n", "line 1.*list"),
        ("a.xls", "x", ".csv, .tsv"),
        ("a.csv", "text,label\n", "rows in a.csv"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, name: str, content: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        records(a_file(tmp_path, name, content), TEXT)


def test_one_file_is_cut_80_10_10_by_a_seed(tmp_path: Path) -> None:
    path = a_file(tmp_path, "a.csv", as_csv(reviews(50), "text", "label"))
    found = read_splits(path, TEXT, seed=3)
    assert counts(found) == [40, 5, 5]
    assert sorted(each for split in found.values() for each in split) == sorted(reviews(50))
    assert found == read_splits(path, TEXT, seed=3) != read_splits(path, TEXT, seed=4)
    with pytest.raises(ValueError, match="at least 10 examples"):
        divided({"train": reviews(5)})


def test_what_is_held_out_shares_no_question_with_training() -> None:
    rows = [(f"q{at // 4}", f"a{at}", str(at % 2)) for at in range(80)]
    found = divided({"train": rows, "test": rows[:3]}, seed=1)
    assert counts(found) == [72, 8, 3]
    assert not {record[0] for record in found["train"]} & {record[0] for record in found["dev"]}


def test_folders_with_splits_or_with_labels(tmp_path: Path) -> None:
    rows = as_csv(reviews(20), "text", "label")
    both = written(tmp_path / "files", **{"train.csv": rows, "validation.csv": rows, "test.csv": rows})
    assert counts(read_splits(both, TEXT)) == [20, 20, 20]
    for at in range(10):
        written(tmp_path / "labels", **{f"cat__{at}.txt": f"meow {at}", f"dog__{at}.txt": f"woof {at}"})
        for split in ("train", "test"):
            written(tmp_path / "deep", **{f"{split}__{label}__{at}": "x" for label in "abcd"})
    assert {label for _, label in read_splits(tmp_path / "labels", TEXT)["train"]} == {"cat", "dog"}
    assert counts(read_splits(tmp_path / "deep", TEXT)) == [36, 4, 40]
    with pytest.raises(ValueError, match=r"train.csv.*got .*labels"):
        read_splits(tmp_path, PAIR)
    with pytest.raises(ValueError, match="not there"):
        read_splits(tmp_path / "nowhere", TEXT)


# ---------------------------------------------------------------------------------------------------- public sets


def test_public_sentences_in_their_old_encodings(tmp_path: Path) -> None:
    lines = [b"0 does n 't work \x85 caf\xe9 .", b"1 fine"] * 10
    written(tmp_path / "sentences", **{"data__rt-polarity.all": b"\n".join(lines) + b"\n"})
    found = text_set(tmp_path, "MR")
    assert sum(map(len, found.values())) == 20
    assert {each for split in found.values() for each in split} == {("does n't work … café .", "0"), ("fine", "1")}
    for name, mark in (("train", "a"), ("dev", "b"), ("test", "c")):
        written(tmp_path / "sentences", **{f"data__stsa.binary.{name}": f"1 {mark} é\n"})
    assert text_set(tmp_path, "SST-2") == {"train": [("a é", "1")], "dev": [("b é", "1")], "test": [("c é", "1")]}


def test_public_documents(tmp_path: Path) -> None:
    for at in range(10):
        for split in ("train", "test"):
            written(tmp_path / "20news", **{f"data__20news-bydate-{split}__sci.med__{at}": b"From: caf\xe9"})
            written(tmp_path / "imdb", **{f"aclImdb__{split}__{label}__{at}.txt": "x" for label in ("pos", "unsup")})
    written(tmp_path / "20news", **{"data__20news-bydate-train__sci.med__3-o": "a stray"})
    found = text_set(tmp_path, "20NEWS")
    assert counts(found) == [9, 1, 10]
    assert found["dev"] == [("From: café", "sci.med")]
    assert {label for _, label in text_set(tmp_path, "IMDB")["test"]} == {"pos"}
    articles = "".join(f'<article id="{at}" title="T{at}"><p>one <a>two</a></p></article>' for at in range(10))
    truth = "".join(f'<article id="{at}" hyperpartisan="{"true" if at % 2 else "false"}"/>' for at in range(10))
    a_file(tmp_path / "hyperpartisan", "articles-x.xml", f"<a>{articles}</a>")
    a_file(tmp_path / "hyperpartisan", "ground-truth-x.xml", f"<a>{truth}</a>")
    every = [each for split in text_set(tmp_path, "Hyperpartisan").values() for each in split]
    assert ("T3\none two", "true") in every
    assert len(every) == 10


def test_pairs_without_a_training_file_train_on_dev(tmp_path: Path) -> None:
    lines = "".join(f"a {at}\tb {at}\t{at % 3}\n" for at in range(20))
    written(tmp_path / "matching", **{"data__snli__dev.txt": lines, "data__snli__test.txt": lines})
    found = pair_set(tmp_path, "SNLI")
    assert counts(found) == [18, 2, 20]
    assert found["test"][1] == ("a 1", "b 1", "1")
    every = {f"data__wikiqa__{split}.txt": "q\ta\t1\nq\tb\t0\n" for split in ("train", "dev", "test")}
    written(tmp_path / "matching", **every)
    task = Pairs.public(tmp_path, "WikiQA")
    assert isinstance(task, Ranking)
    assert [example.group for example in task.splits["test"]] == [0, 0]


def test_what_a_set_lacks_is_said_and_its_own_folder_is_found(tmp_path: Path) -> None:
    written(tmp_path / "20news-bydate", **{"20news-bydate-train__sci.med__1": "x"})
    for data in (tmp_path, tmp_path / "20news-bydate"):
        home = folder_of(data, "20news")
        assert home == tmp_path / "20news-bydate"
        assert inside(home, "20news-bydate-train") == home / "20news-bydate-train"
    with pytest.raises(ValueError, match=r"wanted 20news-bydate-test in 20news-bydate.*try "):
        text_set(tmp_path, "20NEWS")
    (tmp_path / "hyperpartisan").mkdir()
    with pytest.raises(ValueError, match="ground-truth"):
        text_set(tmp_path, "Hyperpartisan")
    (tmp_path / "embeddings").mkdir()
    with pytest.raises(ValueError, match="100d"):
        _texts.loaded(tmp_path, "CR", 0, 8, "100d", False)


# ---------------------------------------------------------------------------------------------------- figures


def test_map_and_mrr_by_hand() -> None:
    judged = [  # question, score, right
        (0, 0.9, 1),
        (0, 0.5, 0),
        (0, 0.1, 1),  # right ones are first and third: (1 + 2/3) / 2
        (1, 0.2, 1),
        (1, 0.8, 0),  # second: 1/2
        (2, 0.3, 0),
        (2, 0.1, 0),  # none right: left out
        (3, 0.5, 1),  # none wrong: left out
        (4, 0.5, 1),
        (4, 0.5, 0),  # of equals the later one comes first: 1/2
    ]
    found = ranked(*zip(*judged, strict=True))
    assert found["map"] == pytest.approx((5 / 6 + 1 / 2 + 1 / 2) / 3)
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 2) / 3)


class Said(torch.nn.Module):
    """Answers what it was told to, in order."""

    def __init__(self, *picked: int, classes: int = 3) -> None:
        super().__init__()
        self.picked, self.classes = list(picked), classes
        self.nothing = torch.nn.Parameter(torch.zeros(()))

    def forward(self, tokens: torch.Tensor, key_mask: torch.Tensor) -> Any:
        from clusterattn_papers.models import Answer

        now, self.picked = self.picked[: len(tokens)], self.picked[len(tokens) :]
        return Answer(torch.nn.functional.one_hot(torch.tensor(now), self.classes).float(), torch.zeros(()))


def test_accuracy_and_f1_by_hand() -> None:
    task = Classify({"train": [("x", label) for label in "abc"], "dev": [("x", label) for label in "aabbb"]})
    found = judge(task, Said(0, 1, 1, 1, 0), "dev", batch=2)
    assert found["accuracy"] == pytest.approx(3 / 5)
    assert found["f1"] == pytest.approx((2 * 1 / (2 * 1 + 1 + 1) + 2 * 2 / (2 * 2 + 1 + 1)) / 2)  # c does not occur


def test_a_ranking_wants_right_and_wrong() -> None:
    with pytest.raises(ValueError, match="labels 0"):  # before any training
        Ranking({"dev": [("q", "a", "yes"), ("q", "b", "no")]})


# ---------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_no_answer(method: str) -> None:
    rows = [(text, label) for text, label in reviews(12, longest=9)]
    alone = Classify({"train": rows})
    paired = Pairs({"train": [(text, rows[-1][0], label) for text, label in rows]})
    for task in (alone, paired):
        torch.manual_seed(0)
        model = task.model(method, dim=16, heads=2).eval()
        some = task.collate(task.splits["train"][:4])
        wide = task.collate(task.splits["train"])  # as long as the longest of all
        with torch.no_grad():
            short = model(some["tokens"], some["key_mask"]).logits
            longer = model(wide["tokens"], wide["key_mask"]).logits[:4]
        torch.testing.assert_close(short, longer, rtol=1e-4, atol=1e-4)


def test_a_text_without_words_and_a_long_one_have_an_answer() -> None:
    task = Classify({"train": reviews(10)}, length=3000)
    model = task.model("refined:clusters=8,top=8", dim=16, heads=2, layers=1)
    said = task.predict(model, ["", "lovely " * 5000])
    assert [label in task.labels and 0 < chance <= 1 for label, chance in said] == [True, True]
    assert model.training
    with pytest.raises(ValueError, match="text as strings"):
        task.predict(model, [("a", "b")])


def test_a_users_csv_becomes_a_model_that_reads_new_texts(tmp_path: Path) -> None:
    task = Classify.read(a_file(tmp_path, "reviews.csv", as_csv(reviews(), "text", "label")))
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "layers": 1, "words_dropout": 0.0, "dropout": 0.0}
    model = task.model("refined:clusters=4,top=4", **sizes)
    fitted = fit(task, model, Settings(epochs=12, batch=8, lr=1e-2), device="cpu")
    assert judge(task, fitted.model, "test")["accuracy"] == 1.0
    task.save(tmp_path / "model")
    again = Classify.restore(tmp_path / "model")
    model = again.model("refined:clusters=4,top=4", **sizes)
    model.load_state_dict(fitted.model.state_dict())
    said = again.predict(model, ["a lovely lovely film", "an awful awful Plot"])
    assert [label for label, _ in said] == ["good", "bad"]
    assert said == task.predict(fitted.model, ["a lovely lovely film", "an awful awful Plot"])
    assert json.loads((tmp_path / "model" / "task.json").read_text())["labels"] == ["bad", "good"]


@pytest.mark.parametrize("kind", [Classify, Pairs])
def test_word_vectors_of_another_width_come_back(kind: Any, tmp_path: Path) -> None:
    vectors = Vectors({"lovely": 0, "awful": 1}, torch.randn(2, 6))
    rows = [(*[text] * (len(kind.columns) - 1), label) for text, label in reviews(20)]
    task = kind({"train": rows, "dev": rows}, vectors=vectors)
    sizes = {"dim": 16, "heads": 2, "layers": 1}
    fitted = fit(task, task.model("clusterformer", **sizes), Settings(epochs=1), device="cpu")
    save(tmp_path, task, fitted, "clusterformer", sizes, {})
    again, model = load(tmp_path)
    asked = [rows[0][0] if kind is Classify else rows[0][:2]]
    assert again.predict(model, asked) == task.predict(fitted.model, asked)


def test_a_users_pairs(tmp_path: Path) -> None:
    rows = [(text, f"{text} indeed", label) for text, label in reviews(20)]
    for head in (("premise", "hypothesis", "label"), ()):
        task = Pairs.read(a_file(tmp_path, "pairs.csv", as_csv(rows, *head)))
        assert task.labels == ["bad", "good"]
        assert len(task.splits["train"]) == 16
        ((label, chance),) = task.predict(task.model("exact", dim=16, heads=2), [("one", "two")])
        assert label in task.labels
        assert 0.5 <= chance <= 1
    with pytest.raises(ValueError, match="two different labels"):
        Pairs({"train": [("a", "b", "x")]})
