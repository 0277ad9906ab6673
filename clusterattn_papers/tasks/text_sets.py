"""The public sets of the papers' text experiments, in the forms in which they are handed around."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from clusterattn._errors import check_choice
from clusterattn.measure.reading import text_of

from .files import folder_of, inside
from .labelled_files import Record, Splits, divided, labelled_folders

SENTENCES = {  # one sentence on a line: its label, a space, its words
    "CR": {"train": "custrev.all"},
    "MR": {"train": "rt-polarity.all"},
    "SUBJ": {"train": "subj.all"},
    "MPQA": {"train": "mpqa.all"},
    "TREC": {"train": "TREC.train.all", "test": "TREC.test.all"},
    "SST-1": {split: f"stsa.fine.{split}" for split in ("train", "dev", "test")},
    "SST-2": {split: f"stsa.binary.{split}" for split in ("train", "dev", "test")},
}
DOCUMENTS = ("20NEWS", "IMDB", "Hyperpartisan")
PAIRS = ("SNLI", "SciTail", "Quora", "WikiQA", "MRPC", "RTE", "SICK", "WNLI")


def text_set(data: Path | None, name: str, *, seed: int = 0) -> Splits:
    """(text, label) of a public set under ``data``: its own splits, and by lot what they lack (see ``divided``)."""
    check_choice("text_set", "name", name, (*SENTENCES, *DOCUMENTS))
    if name in SENTENCES:
        found = {
            split: _sentences(inside(folder_of(data, "sentences"), file)) for split, file in SENTENCES[name].items()
        }
    elif name == "20NEWS":
        home = folder_of(data, "20news")
        found = {
            split: labelled_folders(inside(home, f"20news-bydate-{split}"), keep=lambda path: path.name.isdigit())
            for split in ("train", "test")
        }
    elif name == "IMDB":
        home = folder_of(data, "imdb")
        found = {
            split: [each for each in labelled_folders(inside(home, split)) if each[1] in ("pos", "neg")]
            for split in ("train", "test")
        }
    else:
        found = {"train": _hyperpartisan(folder_of(data, "hyperpartisan"))}
    return divided(found, seed=seed)


def pair_set(data: Path | None, name: str, *, seed: int = 0) -> Splits:
    """(text, text, label) of a public set. Where it comes without its training split, as SNLI, SciTail and Quora are
    handed around, dev is what there is to train on."""
    check_choice("pair_set", "name", name, PAIRS)
    home = inside(folder_of(data, "matching"), name.lower())
    found = {path.stem: _tab_separated(path) for path in sorted(home.glob("*.txt"))}
    if "train" not in found:
        found["train"] = found.pop("dev") if "dev" in found else _tab_separated(inside(home, "train.txt"))
    return divided(found, seed=seed)


def _sentences(path: Path) -> list[Record]:
    # lines end at "\n" alone: some of these texts hold other characters that python, too, takes for an end of line
    lines = [line.partition(" ") for line in text_of(path).split("\n") if line.strip()]
    return [(text.replace(" n 't", " n't").strip(), label) for label, _, text in lines]


def _tab_separated(path: Path) -> list[Record]:
    return [tuple(line.rstrip("\r").split("\t")) for line in text_of(path).split("\n") if line.strip()]


def _hyperpartisan(folder: Path) -> list[Record]:
    truth = {
        each.get("id"): each.get("hyperpartisan", "")
        for each in ElementTree.parse(inside(folder, "ground-truth*.xml")).getroot()
    }
    articles = ElementTree.parse(inside(folder, "articles*.xml")).getroot()
    return [(f"{each.get('title', '')}\n{''.join(each.itertext())}", truth[each.get("id")]) for each in articles]
