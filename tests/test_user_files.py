"""A user's slips: what is wrong with a file is said, and never trained on."""

from __future__ import annotations

import pytest

from clusterattn.tasks.labelled_files import records
from clusterattn.tasks.pairs import ranked
from clusterattn.tasks.text import Classify


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
