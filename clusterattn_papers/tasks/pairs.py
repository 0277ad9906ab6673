"""Pairs of texts and their labels: does one follow from the other, do they ask the same, does one answer the other."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from clusterattn._errors import bad_value

from ..models.text import PairClassifier
from ._task import Batch, Figures
from .text import Labelled
from .text_sets import pair_set
from .vocabulary import Vectors


class Pairs(Labelled):
    """Two texts, one label."""

    name: ClassVar[str] = "pairs"
    columns: ClassVar[tuple[str, ...]] = ("text_a", "text_b", "label")
    network = PairClassifier

    @classmethod
    def public(
        cls, data: Path | None, name: str, *, length: int | None = None, vectors: Vectors | None = None, seed: int = 0
    ) -> Pairs:
        """A public set of ``text_sets`` under ``data``; WikiQA is a ``Ranking``."""
        kind = Ranking if name == "WikiQA" else Pairs
        return kind(pair_set(data, name, seed=seed), length=length, vectors=vectors)

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.view(-1, 2, rows.shape[1])


class Ranking(Pairs):
    """Questions (the first text) and candidate answers, right (label 1) or wrong (0): the mean over questions of the
    average precision (MAP) and of the reciprocal rank of the first right answer (MRR)."""

    name: ClassVar[str] = "ranking"
    figure: ClassVar[str] = "map"

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        if self.labels != ["0", "1"]:
            raise bad_value("labels 0 (wrong) and 1 (right)", ", ".join(self.labels), "the task pairs, for accuracy")

    def judge(self, model: nn.Module, batches: Iterable[Batch]) -> Figures:
        logits, right, question = self._answers(model, batches)
        found = ranked(question.tolist(), (logits[:, 1] - logits[:, 0]).tolist(), right.tolist())
        return {**found, "accuracy": (logits.argmax(-1) == right).double().mean().item()}


def ranked(questions: Sequence[int], scores: Sequence[float], right: Sequence[int]) -> Figures:
    """MAP and MRR as trec_eval has them: the highest score first, of equals the later one. As in WikiQA's reference
    files, questions whose candidates are all wrong, or all right, are left out: there is nothing to rank."""
    lists: dict[int, list[tuple[float, int, int]]] = {}
    for at, (question, score, good) in enumerate(zip(questions, scores, right, strict=True)):
        lists.setdefault(question, []).append((score, at, good))
    precisions, reciprocals = [], []
    for each in lists.values():
        found = [rank for rank, (_, _, good) in enumerate(sorted(each, reverse=True), start=1) if good]
        if 0 < len(found) < len(each):
            precisions.append(sum(at / rank for at, rank in enumerate(found, start=1)) / len(found))
            reciprocals.append(1 / found[0])
    if not precisions:
        wanted = "a question that has right and wrong answers"
        raise bad_value(wanted, f"none among {len(lists)}", "several answers to each question, or the task pairs")
    return {"map": statistics.fmean(precisions), "mrr": statistics.fmean(reciprocals)}
