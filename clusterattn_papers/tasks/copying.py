"""The masked copy task (Clustered attention, appendix C.2): 0w0w with holes that the other half can fill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clusterattn._errors import bad_value, check_whole
from clusterattn.methods import MethodSpec
from clusterattn.ops import draw

from ..models.tagger import Tagger
from ._task import Batch, Figures, Task, classified

STREAM_SYMBOLS, STREAM_HOLES = 21, 22  # of ``ops.draw``; no method draws from them
JUDGED = 1 << 31  # the first of the examples for dev and test: training never gets there


class Copying(Task):
    """Inputs 0w0w with w in {1 … symbols}^letters and some tokens masked, each w_j in one half at most, so that the
    whole 0w0w can be told from what is left.

    Examples are whole numbers: example i is drawn from (seed, i) and nothing else, whichever batch it is in.
    letters   of w; inputs have n = 2 (letters + 1) tokens
    masked    the chance of each letter to be masked: 2 x masked of the places j have a hole, in either half alike
    examples  of an epoch of training
    judged    examples of "dev", and of "test"

    "accuracy" is over the masked tokens alone: the others can be copied from where they stand. It is 1/symbols by
    guessing. "accuracy_all" is over all tokens, separators too; the paper does not say which of the two it shows.
    "accuracy_first" and "accuracy_second" are over the masked tokens of one half: a hole of the first half is answered
    further on, and not every method looks as far ahead as back.
    """

    name: ClassVar[str] = "copying"
    figure: ClassVar[str] = "accuracy"

    def __init__(
        self,
        letters: int = 31,
        *,
        symbols: int = 10,
        masked: float = 0.2,
        examples: int = 160_000,
        judged: int = 512,
        seed: int = 0,
    ) -> None:
        check_whole("Copying", letters=letters, symbols=symbols, examples=examples, judged=judged)
        if not 0 < masked <= 0.5:
            raise bad_value("Copying(masked above 0, at most one half)", masked, "masked=0.2")
        self.letters, self.symbols, self.masked, self.seed = letters, symbols, masked, seed
        self.splits: Mapping[str, Sequence[Any]] = {
            "train": range(examples),
            "dev": range(JUDGED, JUDGED + judged),
            "test": range(JUDGED + judged, JUDGED + 2 * judged),
        }

    @property
    def hole(self) -> int:
        """The id of a masked token."""
        return self.symbols + 1

    def model(self, method: MethodSpec, **sizes: Any) -> nn.Module:
        return Tagger(self.hole + 1, self.hole, method, length=2 * (self.letters + 1), **sizes)

    def collate(self, examples: Sequence[int]) -> Batch:
        """ids (b n) and targets (b n)."""
        at = torch.tensor(examples).unsqueeze(1) * self.letters + torch.arange(self.letters)
        word = 1 + draw.bits(at, self.seed << 32, STREAM_SYMBOLS) % self.symbols
        lot = draw.bits(at, self.seed << 32, STREAM_HOLES) / 2.0**32
        first, second = lot < self.masked, lot >= 1 - self.masked
        zero = torch.zeros(len(examples), 1, dtype=torch.long)
        seen = (word.masked_fill(holes, self.hole) for holes in (first, second))
        ids = torch.cat([part for half in seen for part in (zero, half)], 1)
        return {"ids": ids, "targets": torch.cat([zero, word, zero, word], 1)}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Over all tokens: the model is to say the whole 0w0w."""
        return classified(model(batch["ids"]), batch["targets"])

    def judge(self, model: nn.Module, batches: Iterable[Batch]) -> Figures:
        counts = torch.zeros(6, dtype=torch.float64)
        for batch in batches:
            same, holes = model(batch["ids"]).logits.argmax(-1) == batch["targets"], batch["ids"] == self.hole
            everywhere, (first, second) = torch.ones_like(holes), holes.chunk(2, 1)
            ahead, back = same.chunk(2, 1)
            counted = (ahead & first, first, back & second, second, same, everywhere)
            counts += torch.stack([each.sum() for each in counted]).cpu()
        ahead_right, ahead_all, back_right, back_all, right_all, tokens = counts.tolist()
        return {
            "accuracy": (ahead_right + back_right) / max(ahead_all + back_all, 1),
            "accuracy_first": ahead_right / max(ahead_all, 1),
            "accuracy_second": back_right / max(back_all, 1),
            "accuracy_all": right_all / max(tokens, 1),
        }
