"""ClusterFormer's own settings: the number of clusters (Table 4) and the losses (Table 5)."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from clusterattn._rows import Row
from clusterattn.methods import ClusterFormer

from ..tasks.text import Labelled
from ._experiment import Cell, Context, Table, apart, beside, chosen, lead
from ._groupings import groupings
from ._pace import Step, forward_backward, measured
from ._readings import CHOSEN, DEFAULT, GROUPED, NEW, PAPERS, READINGS, reading
from ._texts import LOSSES, TextConfig, TextExperiment, against_paper, model_of, sizes_note, trained
from .clusterformer_text import PAIR_COLUMNS, PAPER, SMALL_PAIRS, SMOKE, TRAINED_ON_DEV

TABLE4 = {  # clusters (0: exact attention): accuracy, MiB, seconds
    0: (84.8, 21268, 263.5), 5: (84.9, 10980, 197.9), 10: (84.3, 9312, 169.4), 20: (85.0, 8542, 153.6),
    30: (84.5, 8282, 147.6), 60: (84.3, 8072, 150.4), 100: (83.6, 7920, 151.7), 300: (83.6, 7830, 170.0),
    500: (83.2, 8444, 194.4),
}  # fmt: skip
TABLE5 = {  # weights of (L1, L2), zero or not
    "N/N": {"SciTail": 77.19, "map": 61.2, "mrr": 63.6}, "N/Y": {"SciTail": 77.75, "map": 62.0, "mrr": 64.0},
    "Y/N": {"SciTail": 75.96, "map": 61.9, "mrr": 63.3}, "Y/Y": {"SciTail": 78.32, "map": 63.1, "mrr": 64.8},
}  # fmt: skip


class ClusterFormerTable4(TextExperiment):
    name = "clusterformer-table4"
    place = "Table 4"
    about = "number of clusters k against accuracy, memory and time on 20NEWS"
    needs = ("20news", "embeddings")
    scales: ClassVar[dict[str, Any]] = {
        "smoke": TextConfig(sets=(("20NEWS", 1),), many_clusters=(0, 5, 10), **SMOKE),
        "small": TextConfig(
            sets=(("20NEWS", 1),), many_clusters=tuple(TABLE4), epochs=8, patience=None, length=1500, seconds=30.0
        ),
        "paper": TextConfig(sets=(("20NEWS", 1),), many_clusters=tuple(TABLE4), **{**PAPER, "length": 1500}),
    }  # fmt: skip

    def cells(self, config: TextConfig) -> list[Cell]:
        """What was there before the readings keeps its name; the written out transformer and the other readings have
        names of their own. Models may train several at a time; their paces are measured alone."""
        before = [("exact" if k == 0 else f"{k} clusters", {"clusters": k}) for k in config.many_clusters]
        new = [("exact, written out", {"clusters": 0, "reading": WRITTEN_OUT})]
        new += [
            (f"{k} clusters, {label}", {"clusters": k, "reading": label})
            for label in NEW
            for k in config.many_clusters
            if k
        ]
        models = [(name, repeats, *each) for name, repeats in config.sets for each in before + new]
        return [
            *(
                Cell(f"{label}, seed {seed}", {"set": name, "seed": seed, **settings}, config.seconds)
                for name, repeats, label, settings in models
                for seed in range(repeats)
            ),
            *(
                Cell(f"pace of {label}", {"set": name, "seed": 0, "pace": True, **settings}, alone=True)
                for name, _, label, settings in models
            ),
        ]

    def run(self, cell: Cell, config: TextConfig, context: Context) -> list[Row]:
        task, k, label = self.task(cell, config, context), cell.settings["clusters"], cell.settings.get("reading")
        method = reading(label or PAPERS, k) if k else "exact"
        with sdpa_kernel(SDPBackend.MATH) if label == WRITTEN_OUT else contextlib.nullcontext():
            if "pace" in cell.settings:
                return [_pace(task, method, config, context.device)]
            return [trained(task, method, config, cell.settings["seed"], context)]

    def tables(self, rows: Sequence[Row], config: TextConfig) -> list[Table]:
        columns = ["Model", "accuracy, %", "memory, MiB", "time (the paper's seconds | ours, ms of an update)"]
        table = Table("20NEWS (the paper's | ours)", columns)
        models = [("Transformer, written out", 0, WRITTEN_OUT), ("Transformer, SDPA", 0, None)]
        models += [
            (f"k = {k}, {words}", k, label) for label, words in BY_ROW.items() for k in config.many_clusters if k
        ]
        for words, k, label in models:
            accuracy, memory, seconds = TABLE4[k]
            mine = {"clusters": k, "reading": label}
            table.rows.append(
                [
                    words,
                    beside(accuracy, chosen(rows, "accuracy", **mine), times=100),
                    beside(float(memory), chosen(rows, "memory_mib", **mine), 0),
                    beside(seconds, chosen(rows, "seconds", **mine), times=1000),
                ]
            )
        table.notes = [
            "Memory: the most that was allocated while training, model and optimizer with it, on a GPU. "
            f"Time: a forward and a backward pass over {config.batch} texts of {config.length} words, measured with "
            "nothing beside it; the paper does not say what its seconds are of."
        ]
        if all(repeats == 1 for _, repeats in config.sets):
            table.notes.append("One run each: accuracies as close as these are not told apart.")
        parts = {
            words: [row for row in rows if (row["clusters"], row.get("reading")) == (k, label)]
            for words, k, label in models
        }
        return [table, *groupings(parts)]

    def differences(self, config: TextConfig) -> list[str]:
        return [
            f"Texts are cut after {config.length} words (published: 1500); batches hold texts of like length, so few "
            "are as long as that.",
            "The paper's Transformer, of 2022, keeps its attention matrix: written out. Torch's SDPA, beside it, does "
            "not.",
            sizes_note(config, "2 layers of width 300, batches of 64 on a V100"),
            LOSSES,
        ]

    def findings(self, rows: Sequence[Row], config: TextConfig) -> list[str]:
        """The paper: up to 60 clusters little accuracy is lost, and memory and time are saved with any number."""
        lines = []
        for label, grouped in BY_ROW.items():
            for exact, words in ((None, "SDPA"), (WRITTEN_OUT, "the written out transformer")):
                for place, (key, unit) in enumerate(MEASURED.items()):
                    found = {
                        k: each
                        for k in config.many_clusters
                        if (each := chosen(rows, key, clusters=k, reading=label if k else exact))
                    }
                    if len(found) > 1 and 0 in found:
                        ours = {
                            k: statistics.fmean(each) * (100 if key == "accuracy" else 1) for k, each in found.items()
                        }
                        theirs = {k: TABLE4[k][place] for k in found}
                        say = _points if key == "accuracy" else _times
                        lines.append(
                            f"ClusterFormer ({grouped}) against {words}, {unit}: {say(ours)} (paper: {say(theirs)})."
                        )
        return lines


WRITTEN_OUT = "written out"
# by what rows say of their reading
BY_ROW: dict[str | None, str] = {None: GROUPED[PAPERS], **{label: GROUPED[label] for label in NEW}}
MEASURED = {"accuracy": "points of accuracy", "memory_mib": "times the memory", "seconds": "times the time"}
PACE_SECONDS = 0.2


def _pace(task: Labelled, method: str, config: TextConfig, device: torch.device) -> Row:
    """The time of a pass over a batch of the longest texts: it depends on neither the weights nor the words."""
    tokens = torch.ones(config.batch, config.length, dtype=torch.int32, device=device)
    key_mask = torch.ones_like(tokens, dtype=torch.bool)

    def make() -> Step:
        model = model_of(task, method, config).to(device)

        def loss() -> Tensor:
            answer = model(tokens, key_mask)
            total: Tensor = answer.logits.square().mean() + answer.auxiliary
            return total

        return forward_backward(list(model.parameters()), loss)

    return {"batch": config.batch, "length": config.length, **measured(make, device, PACE_SECONDS)}


def _points(by_clusters: Mapping[int, float]) -> str:
    exact, *clustered = sorted(by_clusters)
    ends = max(clustered, key=by_clusters.__getitem__), min(clustered, key=by_clusters.__getitem__)
    return ", ".join(f"{by_clusters[k] - by_clusters[exact]:+.1f} with k = {k}" for k in ends)


def _times(by_clusters: Mapping[int, float]) -> str:
    exact, *clustered = (by_clusters[k] for k in sorted(by_clusters))
    return f"{min(clustered) / exact:.2f} to {max(clustered) / exact:.2f}"


class ClusterFormerTable5(TextExperiment):
    name = "clusterformer-table5"
    place = "Table 5"
    about = "ClusterFormer's losses L1 (clustering) and L2 (sorting of centroids), with and without: SciTail, WikiQA"
    needs = ("matching", "embeddings")
    scales: ClassVar[dict[str, Any]] = {
        "smoke": TextConfig(sets=(("SciTail", 1), ("WikiQA", 1)), methods=tuple(TABLE5), **SMALL_PAIRS | SMOKE),
        "small": TextConfig(sets=(("SciTail", 3), ("WikiQA", 3)), methods=tuple(TABLE5), **SMALL_PAIRS),
        "paper": TextConfig(
            sets=(("SciTail", 3), ("WikiQA", 3)), methods=tuple(TABLE5),
            **{**PAPER, "clusters": 3, "length": 500, "heads": 6, "layers": 1, "batch": 128},
        ),
    }  # fmt: skip
    columns = tuple(each for each in PAIR_COLUMNS if each[1] in ("SciTail", "WikiQA"))

    def methods(self, config: TextConfig) -> tuple[str, ...]:
        """The weights with the first reading, under the names that its rows have, and with the others that have both
        losses and train nothing else."""
        return tuple(each + end for end in ENDS for each in config.methods)

    def run(self, cell: Cell, config: TextConfig, context: Context) -> list[Row]:
        weights, _, label = cell.settings["method"].partition(", ")
        first, _, second = weights.partition("/")
        settings = READINGS[label or PAPERS]
        settings = settings | {"mu": settings["mu"] * (first == "Y"), "nu": settings["nu"] * (second == "Y")}
        method = str(ClusterFormer(clusters=config.clusters, **settings))
        return [trained(self.task(cell, config, context), method, config, cell.settings["seed"], context)]

    def tables(self, rows: Sequence[Row], config: TextConfig) -> list[Table]:
        found = []
        for end, label in ENDS.items():
            table = Table(
                f"L1 / L2 with weight (Y) or without (N), {GROUPED[label]}, per cent (the paper's | ours)",
                ["", *config.methods],
                notes=["± is the standard deviation over seeds."],
            )
            for name, which, key in self.columns:
                cells = [
                    beside(TABLE5[each][name], chosen(rows, key, set=which, method=each + end), 2, 100)
                    for each in config.methods
                ]
                table.rows.append([which if name == which else f"{which} {name.upper()}", *cells])
            found.append(table)
        return [*found, *self.groupings(rows, config)]

    def differences(self, config: TextConfig) -> list[str]:
        return [
            TRAINED_ON_DEV,
            sizes_note(config, "1 layer of width 300, batches of 128, texts of at most 500 words"),
            LOSSES,
            "Only L1 and L2 train centroids (attention knows them through an argmax): with N/N these stay as they were "
            f"drawn. So does the projection of the points, whatever the weights, but with {GROUPED[PAPERS]}: there the "
            "losses train it, and all before it.",
        ]

    def findings(self, rows: Sequence[Row], config: TextConfig) -> list[str]:
        lines = []
        for end, label in ENDS.items():
            for name, which, key in self.columns:
                found = apart(rows, key, "Y/Y" + end, "N/N" + end, set=which)
                if found:
                    paper = TABLE5["Y/Y"][name] - TABLE5["N/N"][name]
                    gain, verdict = lead(found)
                    reached = against_paper(verdict, paper)
                    lines.append(
                        f"{which} {key}, {GROUPED[label]}: both losses bring {gain} points "
                        f"(paper {paper:+.1f}): {reached}."
                    )
        return lines


# What follows the weights in the names of Table 5's cells: its reading.
ENDS = {"": PAPERS, **{f", {label}": label for label in (DEFAULT, CHOSEN)}}
EXPERIMENTS: list[Any] = [ClusterFormerTable4, ClusterFormerTable5]
