"""What ClusterFormer's experiments with sentences, newsgroups and pairs of sentences share: data, budget, training."""

from __future__ import annotations

import functools
import gc
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clusterattn._rows import Row

from ..tasks.files import folder_of, inside
from ..tasks.labelled_files import Record, divided
from ..tasks.pairs import Pairs, Ranking
from ..tasks.text import Classify, Labelled
from ..tasks.text_sets import PAIRS
from ..tasks.vocabulary import Vectors
from ..train import Settings, fit, judge
from ._experiment import Cell, Context, Experiment, Table, apart, lead, pinned
from ._groupings import groupings
from ._readings import PAPERS, READINGS, READINGS_NOTE, best_on_dev, in_paper, reading
from ._readings import SAYS as READ

SAYS = {
    "transformer": "Transformer", "reformer": "Reformer", "routing": "Routing Transformer",
    **READ, "improved": "improved clustered (not in the paper)", "refined": "refined (ours)",
}  # fmt: skip
FOUR = ("transformer", "reformer", "routing", "clusterformer")
OURS = ("improved", "refined")
SHORT = 120.0  # seconds
LEAST_UPDATES = 20  # in an epoch: batches of a small set are smaller
LEAST_STEPS = 800  # in all: of a small set more epochs, all of them, since a short one says little of the next
WARMUP = 50  # updates; less where an epoch is shorter
ALONE = "no telling from one repetition"


@dataclass(frozen=True)
class TextConfig:
    """sets: each with its number of repetitions; clusters: None means near the root of the mean length."""

    sets: tuple[tuple[str, int], ...]
    methods: tuple[str, ...] = FOUR
    for_long: tuple[str, ...] = ()  # further methods where texts are long
    clusters: int | None = None
    many_clusters: tuple[int, ...] = ()  # Table 4's
    invented: bool = False
    vectors: str = "100d"  # in the name of the file of word vectors
    length: int = 512
    dim: int = 128
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1
    words_dropout: float = 0.3
    epochs: int = 10
    patience: int | None = 2
    batch: int = 64
    lr: float = 1e-3
    seconds: float = 20.0


def spec(method: str, mean: float, clusters: int | None) -> str:
    """A method with ClusterFormer's budget: a query meets two blocks of 1/k of the mean length each."""
    k = clusters or max(math.ceil(math.sqrt(mean)), 2)
    block = math.ceil(mean / k)
    if method in READINGS:
        return reading(method, k)
    return {
        "transformer": "exact",
        "reformer": f"reformer:rounds=1,chunk={block}",
        "routing": f"routing:clusters={k},window={2 * block}",
        "improved": f"improved:clusters={k},top={2 * block}",
        "refined": f"refined:clusters={k},top={2 * block}",
    }[method]


def mean_length(task: Labelled) -> float:
    return statistics.fmean(len(text) for example in task.splits["train"] for text in example.texts)


@functools.lru_cache(maxsize=4)
def loaded(data: Path | None, name: str, seed: int, length: int, vectors: str, made_up: bool) -> Labelled:
    """A set, read once for all the cells that a process does."""
    kind = (Ranking if name == "WikiQA" else Pairs) if name in PAIRS else Classify
    if made_up:
        return kind(divided({"train": invented(kind)}), length=length)
    start = Vectors.load(inside(folder_of(data, "embeddings"), f"*{vectors}*.npz"))
    return (Pairs if name in PAIRS else Classify).public(data, name, length=length, vectors=start, seed=seed)


def invented(kind: type[Labelled], count: int = 60) -> list[Record]:
    """Texts that can be told apart by one word; pairs that share one or not."""
    dice = random.Random(0)
    words = [f"{first}{last}" for first in "bdfgklm" for last in ("ab", "el", "in", "op")]
    made: list[Record] = []
    for at in range(count):
        text, good = dice.choices(words, k=dice.randint(3, 40)), at % 2
        if kind is Classify:
            made.append((" ".join([*text, "yes" if good else "no"]), str(good)))
        else:
            other = dice.choices(text if good else words, k=4)
            asked = f"question {at // 4}" if kind is Ranking else " ".join(text)
            made.append((asked, " ".join([*other, "yes" if good else "no"]), str(good)))
    return made


def model_of(task: Labelled, method: str, config: TextConfig, **options: Any) -> nn.Module:
    return task.model(
        pinned(method),
        dim=config.dim,
        heads=config.heads,
        layers=config.layers,
        dropout=config.dropout,
        words_dropout=config.words_dropout,
        **options,
    )


def trained(task: Labelled, method: str, config: TextConfig, seed: int, context: Context, **options: Any) -> Row:
    """One model from start to test."""
    torch.manual_seed(seed)
    model = model_of(task, method, config, **options)
    batch = max(min(config.batch, len(task.splits["train"]) // LEAST_UPDATES), 1)
    per_epoch = math.ceil(len(task.splits["train"]) / batch)
    epochs = config.epochs if config.invented else max(config.epochs, math.ceil(LEAST_STEPS / per_epoch))
    settings = Settings(
        epochs=epochs,
        batch=batch,
        lr=config.lr,
        optimizer="adamw",
        warmup=min(WARMUP, per_epoch),
        clip=1.0,
        # where memory is measured it is that of training: judgements must not need more
        judge_batch=batch if config.many_clusters else 256,
        patience=config.patience if epochs == config.epochs else None,
        seed=seed,
    )
    auxiliary: list[Tensor] = []
    model.register_forward_hook(
        lambda module, _, answer: auxiliary.append(answer.auxiliary.detach()) if module.training else None
    )
    folder = context.work if config.seconds > SHORT else None  # a short training is sooner begun again than saved
    on_gpu, before = context.device.type == "cuda", 0
    if on_gpu:
        gc.collect()  # what earlier cells of this process left
        before = torch.cuda.memory_allocated(context.device)
        torch.cuda.reset_peak_memory_stats(context.device)
    fitted = fit(task, model, settings, folder=folder, device=context.device, tick=context.tick)
    memory = (torch.cuda.max_memory_allocated(context.device) - before) / 2**20 if on_gpu else None
    own = task_losses(fitted.history, fitted.steps, auxiliary)
    history = [
        {"epoch": each["epoch"], "loss": loss, task.figure: round(each[task.figure], 4)}
        for each, loss in zip(fitted.history, own, strict=True)
    ]
    return {
        **judge(task, fitted.model, "test", batch=256, device=context.device),
        "dev": fitted.best[task.figure],
        "spec": method,
        "steps": fitted.steps,
        "memory_mib": memory,
        "history": history,
        **({"groupings": fitted.history[-1]["groupings"]} if "groupings" in fitted.history[-1] else {}),
    }


def task_losses(history: Sequence[Row], steps: int, auxiliary: Sequence[Tensor]) -> list[float | None]:
    """The training losses without what methods add to them, so that they can be compared; None before a restart."""
    left_out, first, found = steps - len(auxiliary), 0, list[float | None]()
    added = torch.stack([*auxiliary]).double().cpu() if auxiliary else torch.zeros(0)
    for each in history:
        mine = added[max(first - left_out, 0) : each["step"] - left_out]
        found.append(round(each["loss"] - mine.mean().item(), 4) if first >= left_out else None)
        first = each["step"]
    return found


class TextExperiment(Experiment):
    """Sets × methods × repetitions. ``readings``: labels of ClusterFormer that are shown beside the first; not in the
    configuration, whose fingerprint the rows of all other methods carry."""

    readings: ClassVar[tuple[str, ...]] = ()

    def methods(self, config: TextConfig) -> tuple[str, ...]:
        """All that are shown, ClusterFormer's readings together."""
        found = list(config.methods)
        if PAPERS in found:
            found[found.index(PAPERS) + 1 : found.index(PAPERS) + 1] = self.readings
        return tuple(found)

    def cells(self, config: TextConfig) -> list[Cell]:
        return [
            Cell(
                f"{name}, {method}, seed {seed}",
                {"set": name, "method": method, "seed": seed},
                config.seconds * (3 if name == "20NEWS" else 1),
            )
            for name, repeats in config.sets
            for method in self.methods(config) + (config.for_long if name == "20NEWS" else ())
            for seed in range(repeats)
        ]

    def groupings(self, rows: Sequence[Row], config: TextConfig) -> list[Table]:
        """Of every set and method whose rows tell of them."""
        return groupings(
            {
                f"{name}: {SAYS.get(method, method)}": [
                    row for row in rows if (row.get("set"), row.get("method")) == (name, method)
                ]
                for name, _ in config.sets
                for method in self.methods(config)
            }
        )

    def task(self, cell: Cell, config: TextConfig, context: Context) -> Labelled:
        # A set without a test split of its own is cut anew in every repetition, in the same way for all methods. One
        # that has it is cut once: where dev is a part of what trains, it is the same part in all repetitions.
        name: str = cell.settings["set"]
        own = name == "20NEWS" or name in PAIRS
        data = None if config.invented else context.data
        seed = 0 if own else cell.settings["seed"]
        return loaded(data, name, seed, config.length, config.vectors, config.invented)

    def run(self, cell: Cell, config: TextConfig, context: Context) -> list[Row]:
        task = self.task(cell, config, context)
        method = spec(cell.settings["method"], mean_length(task), config.clusters)
        return [trained(task, method, config, cell.settings["seed"], context)]


def sizes_note(config: TextConfig, published: str) -> str:
    stop = "" if config.patience is None else f", fewer after {config.patience} without gain"
    if not config.invented:
        stop += f" (where that would be under {LEAST_STEPS} updates, all the epochs that make so many)"
    return (
        f"{config.layers} layer(s) of width {config.dim}, {config.heads} heads, GloVe of {config.vectors}, at most "
        f"{config.epochs} epochs{stop}, batches of {config.batch} (less where an epoch would be under {LEAST_UPDATES} "
        f"updates), AdamW at {config.lr:g} after a rise over {WARMUP} updates or one epoch; published: {published}."
    )


BUDGET = (
    "The paper tells neither Reformer's nor Routing's settings. Here all have ClusterFormer's budget at the mean "
    "length: k blocks of w tokens, a query meets two of them; Reformer one round of chunks of w; Routing k centroids "
    "that take 2w; improved and refined (where shown) k clusters and top 2w."
)
LOSSES = READINGS_NOTE


def compared(
    rows: Sequence[Row],
    columns: Sequence[tuple[str, str, str]],
    published: Mapping[str, Mapping[str, float]],
    other: str,
    one: str = "clusterformer",
) -> str | None:
    """One sentence: how far ``one`` is from ``other`` in every column (name, set, figure)."""
    leads: list[str] = []
    verdicts: dict[str, list[str]] = {"ahead": [], "behind": [], "not told apart": [], ALONE: []}
    for name, which, key in columns:
        found = apart(rows, key, one, other, set=which)
        if found:
            distance, verdict = lead(found)
            theirs = published.get(in_paper(one), {}).get(name)
            paper = "" if theirs is None else f" (paper {theirs - published[other][name]:+.1f})"
            leads.append(f"{name} {distance}{paper}")
            verdicts[verdict or ALONE].append(name)
    if not leads:
        return None
    words = "; ".join(f"{word} on {', '.join(names)}" for word, names in verdicts.items() if names)
    return (
        f"{SAYS[one]} less {SAYS[other]}, points ± standard error of the mean, verdicts at 95 % by Student's t: "
        f"{', '.join(leads)}: {words}."
    )


def best_reading(rows: Sequence[Row], columns: Sequence[tuple[str, str, str]]) -> str | None:
    """One sentence: the reading that dev would choose for each column (name, set, figure), and how it does on test."""
    found = [
        f"{name} {SAYS[best]} ({distance} from the Transformer on test{verdict and f', {verdict}'})"
        for name, which, key in columns
        if (best := best_on_dev(rows, "dev", set=which))
        for distance, verdict in [lead(apart(rows, key, best, "transformer", set=which))]
    ]
    return f"The reading that is best on dev: {'; '.join(found)}." if found else None


def against_paper(verdict: str, paper: float) -> str:
    """A verdict of ``lead`` beside the sign of the paper's own difference."""
    if verdict not in ("ahead", "behind"):
        return f"{verdict} at 95 %" if verdict else ALONE
    return f"{verdict}, {'as in' if (verdict == 'ahead') == (paper > 0) else 'against'} the paper"
