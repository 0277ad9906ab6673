"""Texts with labels, as people keep them: CSV, TSV, JSON lines, a folder of folders."""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from clusterattn._errors import bad_value
from clusterattn.measure.reading import Fault, bad_lines, json_objects, text_of

Record = tuple[str, ...]  # one or two texts, then the label
Splits = dict[str, list[Record]]

NAMES = {  # what people call a column
    "text": ("text", "sentence", "review", "document", "content", "body", "comment", "message"),
    "text_a": ("text_a", "sentence1", "text1", "premise", "question1", "question", "a"),
    "text_b": ("text_b", "sentence2", "text2", "hypothesis", "question2", "answer", "b"),
    "label": ("label", "class", "category", "target", "sentiment", "gold_label", "is_duplicate", "y"),
}
SPLITS = {"train": ("train", "training"), "dev": ("dev", "valid", "validation", "val"), "test": ("test",)}
DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
ENOUGH_TO_TELL = 20  # rows from which on a label that stands in the first line alone must be a heading
LEAST = 10
MANY_NUMBERS = 20  # labels that are numbers, and more than so many, look like a measurement


def read_splits(data: Path, columns: Sequence[str], *, seed: int = 0) -> Splits:
    """A user's data: one file; a folder with files train, dev, test; or folders named like the labels.

    What is missing is taken from "train", by lot: see ``divided``.
    """
    data = Path(data)
    if data.is_file():
        return divided({"train": records(data, columns)}, seed=seed)
    if not data.is_dir():
        raise bad_value("a file or folder", f"{data}, which is not there", "the path of a CSV, TSV or JSONL file")
    found: Splits = {}
    for split, names in SPLITS.items():
        for path in sorted(data.iterdir()):
            if path.is_file() and path.stem.lower() in names and path.suffix.lower() in {*DELIMITERS, *JSON_LINES}:
                found[split] = records(path, columns)
            elif path.is_dir() and path.name.lower() in names and len(columns) == 2:
                found[split] = labelled_folders(path)
    if not found and len(columns) == 2 and any(path.is_dir() for path in data.iterdir()):
        found = {"train": labelled_folders(data)}
    if "train" not in found:
        got = f"{', '.join(sorted(each.name for each in data.iterdir())[:6]) or 'nothing'} in {data}"
        layouts = "train.csv (or .tsv, .jsonl)" + (", or folders named like the labels," if len(columns) == 2 else "")
        raise bad_value(f"{layouts} in the folder", got, "naming the file itself")
    return divided(found, seed=seed)


def divided(found: Splits, *, seed: int = 0) -> Splits:
    """All three splits. A set that comes whole is cut 80/10/10 by lot; a test split without a dev split leaves
    training a tenth less, for dev. Examples that share their text stay together. So do pairs that share the side that
    is repeated more often, a question or a premise; on the other side training may know what is held out."""
    if "dev" in found:
        return found
    whole = found["train"]
    if len(whole) < LEAST:
        raise bad_value(f"at least {LEAST} examples, to hold some out", len(whole), "more data, or a dev file")
    different = len({record[:-1] for record in whole})
    if different < LEAST:
        warnings.warn(
            f"{len(whole)} examples have only {different} different texts: training knows what is held out",
            stacklevel=2,
        )
    families = _families(whole)
    order = torch.randperm(len(families), generator=torch.Generator().manual_seed(seed)).tolist()
    apart: Splits = {split: [] for split in ("dev", "test") if split not in found}
    parts: Splits = {**found, **apart, "train": []}
    for at in order:
        wanting = (split for split in apart if len(apart[split]) < len(whole) // 10)
        parts[next(wanting, "train")] += families[at]
    return parts


def _families(whole: Sequence[Record]) -> list[list[Record]]:
    """Records with the same text; of two texts, the one that is repeated more often."""
    side = min(range(len(whole[0]) - 1), key=lambda at: len({record[at] for record in whole}))
    by_text: dict[str, list[Record]] = {}
    for record in whole:
        by_text.setdefault(record[side], []).append(record)
    return list(by_text.values()) if len(by_text) >= LEAST else [[record] for record in whole]


def labelled_folders(folder: Path, *, keep: Callable[[Path], bool] = lambda path: True) -> list[Record]:
    """Each sub-folder is a label, each file in it a text."""
    found: list[Record] = [
        (text_of(path), label.name)
        for label in sorted(folder.iterdir())
        if label.is_dir() and not label.name.startswith(".")
        for path in sorted(label.iterdir())
        if path.is_file() and not path.name.startswith(".") and keep(path)
    ]
    if not found:
        raise bad_value(f"folders of texts, named like their labels, in {folder}", "none", "a CSV file instead")
    return found


def records(path: Path, columns: Sequence[str]) -> list[Record]:
    """The named columns of a file, in this order; the label is the last. A header may be there or not."""
    suffix, faults = path.suffix.lower(), list[Fault]()
    if suffix in JSON_LINES:
        found = list(_of_json(path, columns, faults))
    elif suffix in DELIMITERS:
        found = list(_of_table(path, columns, DELIMITERS[suffix], faults))
    else:
        advice = "one object on each line, as .jsonl" if suffix == ".json" else "saving it as CSV"
        raise bad_value("a file ending in .csv, .tsv, .txt or .jsonl", path.name, advice)
    if faults:
        raise bad_lines(path, faults)
    if not found:
        raise bad_value(f"rows in {path.name}", "none", "another file")
    return found


def _of_json(path: Path, columns: Sequence[str], faults: list[Fault]) -> Iterator[Record]:
    for number, entry in json_objects(path, faults):
        lowered = {str(key).lower(): value for key, value in entry.items()}
        keys = [next((name for name in NAMES[column] if name in lowered), None) for column in columns]
        if None in keys:
            faults.append(Fault(number, f"the keys {', '.join(columns)}", ", ".join(entry) or "none"))
            continue
        values = [lowered[key] for key in keys if key is not None]
        yield from _checked(number, columns, ["" if value is None else str(value) for value in values], faults)


def _of_table(path: Path, columns: Sequence[str], delimiter: str, faults: list[Fault]) -> Iterator[Record]:
    rows = list(_rows(path, delimiter))
    if not rows:
        return
    heading = [name.strip().lower() for name in rows[0][1]]
    places = [next((heading.index(name) for name in NAMES[column] if name in heading), None) for column in columns]
    others = [name for name in NAMES[columns[-1]] if name in heading]
    if len(others) > 1 and columns[-1] not in heading:
        wanted = f"one column for the {columns[-1]} in {path.name}"
        raise bad_value(wanted, ", ".join(others), f"calling the right one {columns[-1]}")
    if None not in places:
        rows = rows[1:]
    else:
        places = list(_places_without_heading(path, rows, columns))
    for number, row in rows:
        if (len(row) != len(heading) and "".join(row[len(heading) :]).strip()) or len(row) < len(columns):
            why = " (an unquoted comma?)" if delimiter == "," and len(row) > len(heading) else ""
            faults.append(Fault(number, f"{len(heading)} cells", f"{len(row)}{why}"))
            continue
        chosen = [row[place] if place is not None and place < len(row) else "" for place in places]
        yield from _checked(number, columns, chosen, faults)


def _rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Lines and their numbers."""
    lines = text_of(path).split("\n")
    try:
        yield from _split(lines, delimiter)
    except csv.Error as error:
        raise bad_value(f"a table in {path.name}", str(error), "saving it anew, as CSV in UTF-8") from None


def _split(lines: Sequence[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """TSV has no quotes, unless its lines make rows of one width only with them; a CSV field may hold a whole book."""
    if delimiter == "\t":
        plain = [(at, line.rstrip("\r").split("\t")) for at, line in enumerate(lines, start=1) if line.strip()]
        quoted = list(_quoted(lines, delimiter)) if len({len(row) for _, row in plain}) > 1 else plain
        yield from quoted if len({len(row) for _, row in quoted}) == 1 else plain
    else:
        yield from _quoted(lines, delimiter)


def _quoted(lines: Sequence[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    before = csv.field_size_limit(sys.maxsize)
    try:
        reader, number = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter), 1
        for row in reader:
            if any(row) and row != ["\n"]:
                yield number, row
            number = reader.line_num + 1
    finally:
        csv.field_size_limit(before)


def _places_without_heading(path: Path, rows: Sequence[tuple[int, list[str]]], columns: Sequence[str]) -> list[int]:
    """Where each column is: the one with the fewest different values, then the shortest, is the label."""
    width = len(rows[0][1])
    if width != len(columns):
        got = f"the columns {', '.join(rows[0][1])[:200]}"
        advice = "commas between the cells" if ";" in rows[0][1][0] else "a first line with these names"
        raise bad_value(f"columns named {', '.join(columns)} in {path.name}", got, advice)
    values = [[row[at] for _, row in rows if len(row) == width] for at in range(width)]
    label = min(range(width), key=lambda at: (len(set(values[at])), sum(map(len, values[at]))))
    if len(rows) >= ENOUGH_TO_TELL and rows[0][1][label] not in values[label][1:]:
        wanted = f"columns named {', '.join(columns)} in {path.name}"
        raise bad_value(wanted, f"a first line {', '.join(rows[0][1])[:200]}", "these names in the first line")
    return [at for at in range(width) if at != label] + [label]


def _checked(number: int, columns: Sequence[str], values: Sequence[str], faults: list[Fault]) -> Iterator[Record]:
    """The record of a line, unless some of it is empty."""
    empty = [column for column, value in zip(columns, values, strict=True) if not value.strip()]
    if empty:
        faults.append(Fault(number, f"a {' and a '.join(empty)}", "nothing there"))
    else:
        yield (*values[:-1], values[-1].strip())


def warn_of_labels(counts: Mapping[str, int]) -> None:
    """Say what a model can hardly learn: a label of one example, numbers that are a scale and no names."""
    once = [label for label, count in counts.items() if count == 1]
    if once:
        shown = ", ".join(once[:6]) + (", …" if len(once) > 6 else "")
        which = "1 label has" if len(once) == 1 else f"{len(once)} of {len(counts)} labels have"
        warnings.warn(f"{which} a single example ({shown}): nobody can learn and be judged by it", stacklevel=3)
    if len(counts) > MANY_NUMBERS and all(_is_number(label) for label in counts):
        warnings.warn(
            f"all {len(counts)} labels are numbers: to a classifier 3 is as far from 4 as from 400. For a regression "
            "cut them into a few ranges",
            stacklevel=3,
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
