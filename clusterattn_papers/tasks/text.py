"""Texts and their labels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from clusterattn._errors import bad_value
from clusterattn._files import write_whole
from clusterattn.methods import MethodSpec

from ..models.text import Classifier, PairClassifier
from ._task import Batch, Figures, Task, classified, padded, several
from .labelled_files import Record, read_splits, warn_of_labels
from .text_sets import text_set
from .vocabulary import ABOUT, Vectors, Vocabulary, words_of

LONGEST = 8192  # words of a text that are read unless told otherwise
AT_ONCE = 16  # texts in one call of ``predict``
VOCABULARY = "vocabulary.json"
Self = TypeVar("Self", bound="Labelled")


class WordExample(NamedTuple):
    texts: tuple[Tensor, ...]  # word numbers (n) int32
    label: int
    group: int = 0  # examples that are judged together


class Labelled(Task):
    """One or two texts and a label. The vocabulary is that of the training split; with word vectors also what they
    know of the others'."""

    figure: ClassVar[str] = "accuracy"
    columns: ClassVar[tuple[str, ...]]
    network: ClassVar[type[Classifier] | type[PairClassifier]]

    def __init__(
        self,
        records: Mapping[str, Sequence[Record]],
        *,
        length: int | None = None,
        vectors: Vectors | None = None,
        vocabulary: Vocabulary | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        self.limit = LONGEST if length is None else length
        cut = {
            split: [[words_of(text)[: self.limit] for text in record[:-1]] for record in each]
            for split, each in records.items()
        }
        if vocabulary is None:
            seen = set[str]().union(*(words for each in cut.values() for texts in each for words in texts))
            also = seen & vectors.words.keys() if vectors is not None else ()
            # words that stand there once teach what to think of an unknown one
            vocabulary = Vocabulary.of((words for texts in cut.get("train", []) for words in texts), least=2, also=also)
        self.vocabulary = vocabulary
        self.labels = list(labels or sorted({record[-1] for each in records.values() for record in each}))
        if len(self.labels) < 2:
            raise bad_value("at least two different labels", ", ".join(self.labels) or "none", "another column")
        self.start = None if vectors is None else vocabulary.start(vectors)
        number = {label: at for at, label in enumerate(self.labels)}
        self.splits: dict[str, list[WordExample]] = {}
        for split, each in records.items():
            groups: dict[str, int] = {}
            self.splits[split] = [
                WordExample(
                    tuple(map(vocabulary.numbers, texts)),
                    number[record[-1]],
                    groups.setdefault(record[0], len(groups)),
                )
                for texts, record in zip(cut[split], each, strict=True)
            ]
        lengths = sorted(len(text) for example in self.splits.get("train", []) for text in example.texts)
        self.typical = lengths[int(0.9 * len(lengths))] if lengths else self.limit

    @classmethod
    def read(cls: type[Self], data: Path, *, length: int | None = None, seed: int = 0) -> Self:
        """A user's CSV, TSV or JSONL file with the columns of ``cls.columns``, or a folder of such files.

        Without a dev and a test file a tenth each is held out for them, by ``seed`` (80/10/10); with a test file alone
        a tenth of the training file is dev."""
        task = cls(read_splits(data, cls.columns, seed=seed), length=length)
        warn_of_labels(task.counts())
        return task

    def counts(self, split: str | None = None) -> dict[str, int]:
        """How many examples bear each label, in a split or in all of them; the commonest first."""
        chosen = self.splits.values() if split is None else [self.splits[split]]
        found = Counter(self.labels[example.label] for each in chosen for example in each)
        return dict(found.most_common())

    def majority(self, split: str) -> tuple[str, float]:
        """The commonest label of the training examples, and the accuracy on a split of answering nothing else."""
        label = next(iter(self.counts("train")))
        return label, self.counts(split).get(label, 0) / max(len(self.splits[split]), 1)

    def save(self, folder: Path) -> None:
        self.vocabulary.save(Path(folder) / VOCABULARY)
        about = {
            "task": self.name,
            "labels": self.labels,
            "length": self.limit,
            "typical": self.typical,
            "width": None if self.start is None else self.start.shape[1],
        }
        write_whole(Path(folder) / ABOUT, json.dumps(about, ensure_ascii=False, indent=1))

    @classmethod
    def restore(cls: type[Self], folder: Path) -> Self:
        about = json.loads((Path(folder) / ABOUT).read_text(encoding="utf-8"))
        vocabulary = Vocabulary.load(Path(folder) / VOCABULARY)
        task = cls({}, length=about["length"], vocabulary=vocabulary, labels=about["labels"])
        task.typical = about["typical"]
        if about["width"] is not None:  # room for the word vectors: they are among the weights
            task.start = torch.zeros(len(vocabulary), about["width"])
        return task

    def model(self, method: MethodSpec, **sizes: Any) -> nn.Module:
        options = {"length": self.typical, "start": self.start} | sizes
        return self.network(len(self.vocabulary), len(self.labels), method, **options)

    def length(self, example: WordExample) -> int:
        return max(len(text) for text in example.texts)

    def collate(self, examples: Sequence[WordExample]) -> Batch:
        tokens, key_mask = padded([text for example in examples for text in example.texts])
        return {
            "tokens": self._shaped(tokens),
            "key_mask": self._shaped(key_mask),
            "labels": torch.tensor([example.label for example in examples]),
            "group": torch.tensor([example.group for example in examples]),
        }

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return classified(model(batch["tokens"], batch["key_mask"]), batch["labels"])

    def judge(self, model: nn.Module, batches: Iterable[Batch]) -> Figures:
        logits, right, _ = self._answers(model, batches)
        picked, classes = logits.argmax(-1), len(self.labels)
        table = torch.bincount(right * classes + picked, minlength=classes**2).view(classes, classes).double()
        f1 = 2 * table.diagonal() / (table.sum(0) + table.sum(1)).clamp(min=1)
        return {
            "accuracy": (picked == right).double().mean().item(),
            "f1": f1[table.sum(1) > 0].mean().item(),  # the mean over labels that occur
        }

    def _answers(self, model: nn.Module, batches: Iterable[Batch]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, labels and groups of all examples, on the CPU: one wait for the device, not one for each batch."""
        every = [
            (model(each["tokens"], each["key_mask"]).logits.float(), each["labels"], each["group"]) for each in batches
        ]
        logits, right, group = (torch.cat(part).cpu() for part in zip(*every, strict=True))
        return logits, right, group

    @torch.no_grad()
    def predict(self, model: nn.Module, inputs: Sequence[Any]) -> list[tuple[str, float]]:
        """The label of each input, and its probability."""
        device, training = next(model.parameters()).device, model.training
        model.eval()
        predictions: list[tuple[str, float]] = []
        for at in range(0, len(several(inputs)), AT_ONCE):
            batch = self.collate([WordExample(self._numbers(each), 0) for each in inputs[at : at + AT_ONCE]])
            chances = model(batch["tokens"].to(device), batch["key_mask"].to(device)).logits.float().softmax(-1)
            best, which = chances.max(-1)
            predictions += [(self.labels[k], p) for k, p in zip(which.tolist(), best.tolist(), strict=True)]
        model.train(training)
        return predictions

    def _numbers(self, given: Any) -> tuple[Tensor, ...]:
        texts = (given,) if isinstance(given, str) else tuple(given)
        if len(texts) != len(self.columns) - 1 or not all(isinstance(text, str) for text in texts):
            raise bad_value(" and ".join(self.columns[:-1]) + " as strings", repr(given)[:80], "a list of these")
        return tuple(self.vocabulary.numbers(words_of(text)[: self.limit]) for text in texts)


class Classify(Labelled):
    """One text, one label."""

    name: ClassVar[str] = "classify"
    columns: ClassVar[tuple[str, ...]] = ("text", "label")
    network = Classifier

    @classmethod
    def public(
        cls, data: Path | None, name: str, *, length: int | None = None, vectors: Vectors | None = None, seed: int = 0
    ) -> Classify:
        """A public set of ``text_sets`` under ``data``: "CR", "20NEWS", "IMDB", …"""
        return cls(text_set(data, name, seed=seed), length=length, vectors=vectors)
