"""What a task is to the training loop: examples, batches, a loss, and a judgement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clusterattn._errors import bad_value
from clusterattn.methods import MethodSpec

from ..models import Answer

Batch = dict[str, Tensor]
Figures = dict[str, float]

POOL = 50  # batches whose examples are sorted by length among themselves


class Task(ABC):
    """Examples and what to do with them. A task is made from its data; models come from ``model``."""

    name: ClassVar[str]
    figure: ClassVar[str]  # the figure that decides which weights are best
    better: ClassVar[str] = "higher"  # or "lower"

    splits: Mapping[str, Sequence[Any]]  # "train" and "dev", often "test"

    @classmethod
    def read(cls, data: Path, *, length: int | None = None, seed: int = 0) -> Task:
        """The task over a user's own files, for `clusterattn train`."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:  # noqa: B027  (many tasks need nothing)
        """Write what a saved model needs to read new inputs: vocabulary, names of labels."""

    @classmethod
    def restore(cls, folder: Path) -> Task:
        """The task as ``save`` left it, without examples."""
        raise NotImplementedError

    def predict(self, model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
        """What a trained model says to new inputs, in a user's words."""
        raise NotImplementedError

    @abstractmethod
    def model(self, method: MethodSpec, **sizes: Any) -> nn.Module:
        """A fresh model. All methods share everything but the attention."""

    def length(self, example: Any) -> int:
        """Examples of like length share a batch; 0 where it does not matter."""
        return 0

    @abstractmethod
    def collate(self, examples: Sequence[Any]) -> Batch:
        """CPU tensors, padded to the longest."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss SUMMED over examples or tokens, and their number: sums are what processes can share exactly."""

    @abstractmethod
    def judge(self, model: nn.Module, batches: Iterable[Batch]) -> Figures:
        """Figures of a model in eval mode, without gradients; batches come in order, on the model's device."""


def classified(answer: Answer, targets: Tensor, ignore: int = -100, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the targets that are not ``ignore``, with the model's own losses, and their number."""
    count = (targets != ignore).sum().clamp(min=1)
    total = nn.functional.cross_entropy(
        answer.logits.flatten(0, -2).float(),
        targets.flatten(),
        ignore_index=ignore,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return total + answer.auxiliary * count, count


def batches(task: Task, split: str, size: int, *, seed: int | None = None) -> Iterator[Batch]:
    """Every example once: in order without a seed, else shuffled with neighbours of like length. A pure function of
    its arguments, so that an interrupted epoch can be taken up again."""
    for chosen in order(task, split, size, seed=seed):
        yield task.collate([task.splits[split][at] for at in chosen])


def order(task: Task, split: str, size: int, *, seed: int | None = None) -> list[list[int]]:
    """Which examples make up each batch."""
    examples = task.splits[split]
    if seed is None:
        return [list(range(at, min(at + size, len(examples)))) for at in range(0, len(examples), size)]
    dice = torch.Generator().manual_seed(seed)
    mixed = torch.randperm(len(examples), generator=dice).tolist()
    pools = [mixed[at : at + POOL * size] for at in range(0, len(mixed), POOL * size)]
    cut = []
    for pool in pools:
        alike = sorted(pool, key=lambda at: task.length(examples[at]))
        cut += [alike[at : at + size] for at in range(0, len(alike), size)]
    return [cut[at] for at in torch.randperm(len(cut), generator=dice).tolist()]


def several(inputs: Sequence[Any]) -> Sequence[Any]:
    """Inputs to ``predict``; one string is a sequence too, of letters, and never what was meant."""
    if isinstance(inputs, str):
        raise bad_value("a list of inputs", f"the string {inputs[:40]!r}", "[text]")
    return inputs


def padded(rows: Sequence[Sequence[int] | Tensor], value: int = 0, step: int = 1) -> tuple[Tensor, Tensor]:
    """Rows as one tensor (b n), and where they are real. n is a multiple of ``step``."""
    tensors = [torch.as_tensor(row) for row in rows]
    lengths = torch.tensor([len(row) for row in tensors])
    whole = nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
    short = -whole.shape[1] % step
    whole = torch.cat([whole, whole.new_full((len(whole), short, *whole.shape[2:]), value)], 1) if short else whole
    return whole, torch.arange(whole.shape[1]) < lengths.unsqueeze(1)
