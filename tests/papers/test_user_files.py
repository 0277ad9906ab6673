"""A user's slips: what is wrong with a file is said, and never trained on."""

from __future__ import annotations

import gzip
import random

import pytest

from clusterattn.measure.reading import read_wav, text_of
from clusterattn_papers.tasks.labelled_files import divided, records
from clusterattn_papers.tasks.masked import Masked
from clusterattn_papers.tasks.pairs import ranked
from clusterattn_papers.tasks.text import Classify
from clusterattn_papers.tasks.translation import Translate


def _table(tmp_path, name, *lines):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_row_with_too_many_cells_is_refused(tmp_path):
    good = [f"text {at},{'ab'[at % 2]}" for at in range(12)]
    path = _table(tmp_path, "x.csv", "text,label", *good, "text, with a comma,a")
    with pytest.raises(ValueError, match="unquoted comma"):
        records(path, ("text", "label"))
    trailing = _table(tmp_path, "y.csv", "text,label,,", *(f"{line},," for line in good))
    assert len(records(trailing, ("text", "label"))) == 12


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path):
    path = _table(
        tmp_path,
        "x.jsonl",
        '{"text": "a", "label": "b"}',
        "{",
        '["list"]',
        '{"text": "a"}',
        '{"text": "", "label": ""}',
    )
    with pytest.raises(ValueError, match="mending these lines") as caught:
        records(path, ("text", "label"))
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:5]] == [
        f"line {number}" for number in (2, 3, 4, 5)
    ]
    assert "wanted a text and a label, got nothing there" in str(caught.value)
    many = _table(tmp_path, "y.csv", "text,label", *["alone"] * 30, "a,b")
    with pytest.raises(ValueError, match=r"got 30 lines(?s:.*)and 10 more"):
        records(many, ("text", "label"))


def test_two_columns_that_could_be_the_label_are_refused(tmp_path):
    with pytest.raises(ValueError, match="one column for the label"):
        records(_table(tmp_path, "x.csv", "text,sentiment,category", "a b,1,2"), ("text", "label"))


def test_quotes_in_tsv_count_where_lines_do_not_fit_without(tmp_path):
    quoted = _table(tmp_path, "x.tsv", "text\tlabel", '"two', 'lines"\ta', "one\tb")
    assert records(quoted, ("text", "label")) == [("two\nlines", "a"), ("one", "b")]
    plain = _table(tmp_path, "y.tsv", "text\tlabel", 'a "word\ta', "one\tb")
    assert records(plain, ("text", "label"))[0] == ('a "word', "a")


def test_ranking_wants_right_and_wrong_answers():
    with pytest.raises(ValueError, match="right and wrong answers"):
        ranked([0, 1], [0.5, 0.6], [1, 1])


def test_one_string_is_not_a_list_of_inputs(tmp_path):
    task = Classify({"train": [("a b", "x"), ("c d", "y")], "dev": [("a b", "x")], "test": [("c d", "y")]})
    with pytest.raises(ValueError, match="a list of inputs"):
        task.predict(task.model("exact", dim=8, heads=1, layers=1), "a b")


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.txt", "x.jsonl"])
@pytest.mark.parametrize(
    "content",
    [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", gzip.compress(b"text,label\na,b\n" * 99, mtime=0)],
    ids=["picture", "packed"],  # bytes would be in the names, and gzip's hold the time
)
def test_what_is_no_text_is_refused_by_name(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}, with bytes that are no text"):
        records(path, ("text", "label"))
    with pytest.raises(ValueError, match="no text"):
        Masked.read(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_table_may_be_in_any_common_encoding_with_any_line_ends(tmp_path, encoding, end):
    lines = ["text,label", "déjà vu,a", '"one, two",b', ""]
    path = tmp_path / "x.csv"
    path.write_bytes(end.join(lines).encode(encoding))
    assert records(path, ("text", "label")) == [("déjà vu", "a"), ("one, two", "b")]


def test_a_stray_line_end_in_a_table_is_said(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b"text,label\na\rb,c\nd,e\n")
    with pytest.raises(ValueError, match=r"wanted a table in x\.csv"):
        records(path, ("text", "label"))


def test_packed_text_is_read_and_a_torn_file_is_said(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\n"))
    assert text_of(path) == "one\ntwo\n"
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(ValueError, match=r"a whole \.gz file"):
        text_of(path)


def test_it_is_said_when_too_few_texts_differ_to_hold_some_out():
    with pytest.warns(UserWarning, match="40 examples have only 2 different texts"):
        divided({"train": [("one", "a"), ("two", "b")] * 20})


def test_translate_tells_what_is_too_long(tmp_path):
    pytest.importorskip("tokenizers")
    short, long = ["ein hund\ta dog"] * 20, ["ein " * 40 + "hund\ta " + "big " * 40 + "dog"] * 20
    mixed, only = _table(tmp_path, "x.tsv", *short, *long), _table(tmp_path, "y.tsv", *long)
    with pytest.warns(UserWarning, match="of 38 training pairs have 20 tokens or more and are left out"):
        assert 0 < len(Translate.read(mixed, length=20).splits["train"]) < 38
    with pytest.raises(ValueError, match=r"fewer than 20 tokens .length.; got none: the shortest has"):
        Translate.read(only, length=20)
    latin = tmp_path / "z.tsv"
    latin.write_bytes("été\tsummer\n".encode("latin-1") * 20)
    assert len(Translate.read(latin).splits["train"]) == 19


def test_masked_says_that_documents_are_short_or_not_there(tmp_path):
    pytest.importorskip("tokenizers")
    dice = random.Random(0)
    lines = [" ".join(dice.choices(["one", "two", "three", "four"], k=9)) + f",{at % 2}" for at in range(99)]
    with pytest.raises(ValueError, match="each inside one document; got 0 runs in 99 documents"):
        Masked.read(_table(tmp_path, "x.csv", "text,label", *lines))
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"a folder with .txt, .xml or .xz files"):
        Masked.read(tmp_path / "folder")


def test_a_recording_that_is_not_there_or_cut_off(tmp_path):
    with pytest.raises(ValueError, match="which is not there"):
        read_wav(tmp_path / "x.wav")
    (tmp_path / "x.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match="cut off"):
        read_wav(tmp_path / "x.wav")
