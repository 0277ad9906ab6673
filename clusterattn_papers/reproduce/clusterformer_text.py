"""ClusterFormer's experiments with sentences, newsgroups and pairs of sentences: Tables 2 to 5 and Figure 5."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch.nn.attention import SDPBackend, sdpa_kernel

from clusterattn._rows import Row
from clusterattn.measure import plots
from clusterattn.methods import ClusterFormer

from ._experiment import Cell, Context, Table, apart, beside, chosen, lead, spread
from ._readings import CHOSEN, NEW, PAPERS, READINGS, TASK, in_paper, reading
from ._texts import (
    BUDGET,
    LOSSES,
    OURS,
    SAYS,
    TextConfig,
    TextExperiment,
    against_paper,
    best_reading,
    compared,
    sizes_note,
    trained,
)

TABLE2 = {
    "transformer": {"CR": 86.2, "MR": 81.8, "SUBJ": 95.4, "MPQA": 89.9, "20NEWS": 83.6},
    "reformer": {"CR": 83.0, "MR": 79.7, "SUBJ": 94.7, "MPQA": 88.6, "20NEWS": 81.7},
    "routing": {"CR": 80.1, "MR": 78.8, "SUBJ": 94.3, "MPQA": 81.2, "20NEWS": 81.3},
    "clusterformer": {"CR": 88.1, "MR": 82.7, "SUBJ": 96.2, "MPQA": 90.4, "20NEWS": 83.8},
}
TABLE3 = {  # per cent; WikiQA's MAP and MRR come as fractions in the paper
    "transformer": {"SNLI": 83.7, "SciTail": 76.6, "Quora": 85.4, "map": 60.1, "mrr": 61.3},
    "reformer": {"SNLI": 78.6, "SciTail": 67.3, "Quora": 74.3, "map": 58.7, "mrr": 60.3},
    "routing": {"SNLI": 76.3, "SciTail": 72.6, "Quora": 81.5, "map": 56.0, "mrr": 57.4},
    "clusterformer": {"SNLI": 83.9, "SciTail": 77.8, "Quora": 85.4, "map": 63.0, "mrr": 64.8},
}
TABLE4 = {  # clusters (0: exact attention): accuracy, MiB, seconds
    0: (84.8, 21268, 263.5), 5: (84.9, 10980, 197.9), 10: (84.3, 9312, 169.4), 20: (85.0, 8542, 153.6),
    30: (84.5, 8282, 147.6), 60: (84.3, 8072, 150.4), 100: (83.6, 7920, 151.7), 300: (83.6, 7830, 170.0),
    500: (83.2, 8444, 194.4),
}  # fmt: skip
TABLE5 = {  # weights of (L1, L2), zero or not
    "N/N": {"SciTail": 77.19, "map": 61.2, "mrr": 63.6}, "N/Y": {"SciTail": 77.75, "map": 62.0, "mrr": 64.0},
    "Y/N": {"SciTail": 75.96, "map": 61.9, "mrr": 63.3}, "Y/Y": {"SciTail": 78.32, "map": 63.1, "mrr": 64.8},
}  # fmt: skip
FIGURE5 = {"transformer": 21, "reformer": 24, "routing": 29, "clusterformer": 19}  # epochs to convergence

SMALL_PAIRS: dict[str, Any] = {
    "clusters": 3, "length": 128, "dim": 192, "heads": 6, "layers": 1, "batch": 128, "epochs": 12, "patience": 3,
}  # fmt: skip
SMOKE: dict[str, Any] = {
    "invented": True, "length": 64, "dim": 16, "heads": 2, "epochs": 1, "batch": 16, "seconds": 1.0,
}  # fmt: skip
PAPER: dict[str, Any] = {"vectors": "300d", "dim": 300, "epochs": 40, "patience": 5, "lr": 1e-4, "seconds": 2000.0}


class ClusterFormerTable2(TextExperiment):
    name = "clusterformer-table2"
    place = "Table 2"
    about = "text classification: CR, MR, SUBJ, MPQA, 20NEWS; transformer, reformer, routing, clusterformer"
    needs = ("sentences", "20news", "embeddings")
    readings = (CHOSEN, TASK)
    scales: ClassVar[dict[str, Any]] = {
        "smoke": TextConfig(sets=(("CR", 1), ("20NEWS", 1)), for_long=OURS, **SMOKE),
        "small": TextConfig(sets=(("CR", 6), ("MR", 3), ("SUBJ", 3), ("MPQA", 3), ("20NEWS", 3)), for_long=OURS),
        "paper": TextConfig(
            sets=tuple((name, 10) for name in ("CR", "MR", "SUBJ", "MPQA", "20NEWS")), for_long=OURS,
            **{**PAPER, "length": 1500},
        ),
    }  # fmt: skip

    def tables(self, rows: Sequence[Row], config: TextConfig) -> list[Table]:
        sets = [name for name, _ in config.sets]
        table = Table("Test accuracy, per cent (the paper's | ours)", ["Model", *sets, "Average"])
        for method in self.methods(config) + config.for_long:
            paper = TABLE2.get(in_paper(method), {})
            ours = {name: chosen(rows, "accuracy", set=name, method=method) for name in sets}
            whole = all(ours.values())
            theirs = statistics.fmean(paper[name] for name in sets) if paper else None
            mean = [statistics.fmean(statistics.fmean(each) for each in ours.values())] if whole else []
            cells = [beside(paper.get(name), ours[name], times=100) if paper or ours[name] else "–" for name in sets]
            table.rows.append([SAYS[method], *cells, beside(theirs, mean, times=100) if paper else "–"])
        table.notes = ["± is the standard deviation over repetitions."]
        used = {f"{row['set']} {row['spec']}" for row in rows if row["method"] in READINGS}
        if used:
            table.notes.append(f"{', '.join(sorted(used))}.")
        return [table]

    def differences(self, config: TextConfig) -> list[str]:
        return [
            "CR, MR, SUBJ and MPQA have no splits of their own: 80/10/10 by lot, another one in every repetition, the "
            "same for all methods; the paper does not say how it splits. 20NEWS is by date, a tenth of its training "
            "part is dev, the same tenth in all repetitions.",
            f"Texts are cut after {config.length} words (20NEWS with its headers: mean 284 words, longest 11 821).",
            sizes_note(config, "2 layers of width 300, 4 heads, GloVe of 300d, the rest not told"),
            "k is the root of the mean length, not of the longest: our blocks share out a text's own words, not its "
            "padding.",
            BUDGET,
            LOSSES,
        ]

    def findings(self, rows: Sequence[Row], config: TextConfig) -> list[str]:
        columns = [(name, name, "accuracy") for name, _ in config.sets]
        mine = (PAPERS, *self.readings)
        lines = [best_reading(rows, columns)]
        lines += [
            compared(rows, columns, TABLE2, other, one)
            for one in mine
            for other in ("transformer", "reformer", "routing")
        ]
        lines += [compared(rows, columns, TABLE2, "transformer", one) for one in config.for_long]
        for one in mine:
            found = {name: apart(rows, "accuracy", one, "transformer", set=name) for name, _ in config.sets}
            worse = [name for name, each in found.items() if each and statistics.fmean(each) < -1]
            if any(found.values()):
                where = ", ".join(worse) or "none of them"
                lines.append(f"In the mean {SAYS[one]} is more than one point worse than the Transformer on {where}.")
        return [line for line in lines if line]


PAIR_COLUMNS = (("SNLI", "SNLI", "accuracy"), ("SciTail", "SciTail", "accuracy"), ("Quora", "Quora", "accuracy"),
                ("map", "WikiQA", "map"), ("mrr", "WikiQA", "mrr"))  # fmt: skip
TRAINED_ON_DEV = (
    "SNLI, SciTail and Quora are at hand as dev and test only: nine tenths of dev train, one tenth chooses the "
    "weights, the same tenth in all repetitions (pairs with the same premise (SNLI), hypothesis (SciTail) or first "
    "question (Quora) stay together; about 3, 1 and 10 % of these dev pairs still share another sentence with "
    "training), test is judged (about 8 860 pairs of SNLI against 549 367, "
    "1 170 of SciTail against 23 596, 9 000 of Quora against some 384 000). Where a train file is there it is used."
)


class ClusterFormerTable3(TextExperiment):
    name = "clusterformer-table3"
    place = "Table 3"
    about = "inference and matching: SNLI, SciTail, Quora, WikiQA (MAP, MRR); one layer, k = 3"
    needs = ("matching", "embeddings")
    readings = NEW
    scales: ClassVar[dict[str, Any]] = {
        "smoke": TextConfig(sets=(("SNLI", 1), ("WikiQA", 1)), **SMALL_PAIRS | SMOKE),
        "small": TextConfig(sets=(("SNLI", 3), ("SciTail", 3), ("Quora", 3), ("WikiQA", 3)), **SMALL_PAIRS),
        "paper": TextConfig(
            sets=tuple((name, 3) for name in ("SNLI", "SciTail", "Quora", "WikiQA")),
            **{**PAPER, "clusters": 3, "length": 500, "heads": 6, "layers": 1, "batch": 128},
        ),
    }  # fmt: skip

    def tables(self, rows: Sequence[Row], config: TextConfig) -> list[Table]:
        sets = dict(config.sets)
        columns = [each for each in PAIR_COLUMNS if each[1] in sets]
        titles = [name if name == which else f"{which} {name.upper()}" for name, which, _ in columns]
        table = Table("Test accuracy, MAP and MRR, per cent (the paper's | ours)", ["Model", *titles])
        for method in self.methods(config):
            ours = [chosen(rows, key, set=which, method=method) for _, which, key in columns]
            cells = [
                beside(TABLE3[in_paper(method)][name], each, times=100)
                for (name, _, _), each in zip(columns, ours, strict=True)
            ]
            table.rows.append([SAYS[method], *cells])
        table.notes = ["± is the standard deviation over seeds. WikiQA: questions that have right and wrong answers."]
        return [table]

    def differences(self, config: TextConfig) -> list[str]:
        return [
            TRAINED_ON_DEV,
            sizes_note(config, "1 layer of width 300, 6 heads, GloVe of 300d for SNLI and Quora"),
            "SciTail and WikiQA start from GloVe too; in the paper from random vectors.",
            "How the two texts are compared is not told in the paper. Here both go through one encoder; a small "
            "network judges [a, b, |a − b|, a · b] of their means.",
            BUDGET,
            LOSSES,
        ]

    def findings(self, rows: Sequence[Row], config: TextConfig) -> list[str]:
        lines = [best_reading(rows, PAIR_COLUMNS)]
        lines += [
            compared(rows, PAIR_COLUMNS, TABLE3, other, one)
            for one in (PAPERS, *self.readings)
            for other in ("transformer", "reformer", "routing")
        ]
        return [line for line in lines if line]


LINES: dict[str, Any] = dict(zip(NEW, ("--", ":", (0, (4, 1, 1, 1, 1, 1)), "-."), strict=True))


class ClusterFormerFig5(ClusterFormerTable3):
    name = "clusterformer-fig5"
    place = "Figure 5"
    about = "convergence on SNLI: training loss of the four models"
    rows_from = "clusterformer-table3"

    def tables(self, rows: Sequence[Row], config: TextConfig) -> list[Table]:
        table = Table("SNLI: epochs to convergence (the paper's | ours)", ["Model", "epochs", "training loss then"])
        for method in self.methods(config):
            best = [max(row["history"], key=lambda each: each["accuracy"]) for row in self._curves(rows, method)]
            table.rows.append(
                [
                    SAYS[method],
                    beside(str(FIGURE5[in_paper(method)]), [each["epoch"] for each in best]),
                    spread([each["loss"] for each in best], 3),
                ]
            )
        table.notes = ["Ours: the epoch of the best dev accuracy. The paper does not say how it tells convergence."]
        return [table]

    def picture(self, rows: Sequence[Row], config: TextConfig) -> bytes | None:
        with plots.rules():
            figure = plots.canvas(9.2, 5.4)
            axes = figure.subplots()
            for method in self.methods(config):
                for at, row in enumerate(self._curves(rows, method)):
                    colour, marker = plots.style_of(method)
                    axes.plot(
                        [each["epoch"] for each in row["history"]],
                        [each["loss"] for each in row["history"]],
                        color=colour,
                        marker="" if method in LINES else marker,
                        ms=4,
                        lw=1.2,
                        alpha=0.8,
                        ls=LINES.get(method, "-"),
                        label=(method if method in LINES else SAYS[method]) if at == 0 else None,
                    )
            axes.set(xlabel="epoch", ylabel="training loss", title="SNLI: training loss, one line for each seed")
            axes.grid(True)
            figure.legend(loc="outside right upper")
            return plots.as_png(figure)

    def _curves(self, rows: Sequence[Row], method: str) -> list[Row]:
        """The rows, without the epochs whose loss was lost in a restart."""
        return [
            {**row, "history": [each for each in row["history"] if each["loss"] is not None]}
            for row in rows
            if row["set"] == "SNLI" and row["method"] == method
        ]

    def differences(self, config: TextConfig) -> list[str]:
        shown = "Drawn from the rows of Table 3. The loss is the cross-entropy alone, without L1, L2 and commitment."
        return [shown, *super().differences(config)]

    def findings(self, rows: Sequence[Row], config: TextConfig) -> list[str]:
        epochs = {
            method: [
                max(row["history"], key=lambda each: each["accuracy"])["epoch"] for row in self._curves(rows, method)
            ]
            for method in self.methods(config)
        }
        epochs = {method: each for method, each in epochs.items() if each or method in config.methods}
        if not all(epochs.values()):
            return []
        order = sorted(epochs, key=lambda method: statistics.fmean(epochs[method]))
        return [
            "From the fastest to the slowest: "
            + ", ".join(SAYS[method] for method in order)
            + " (paper: ClusterFormer, Transformer, Reformer, Routing Transformer)."
        ]


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
        """What was there before the readings keeps its name; the written out transformer and the chosen reading have
        names of their own."""
        before = [("exact" if k == 0 else f"{k} clusters", {"clusters": k}) for k in config.many_clusters]
        new = [("exact, written out", {"clusters": 0, "reading": WRITTEN_OUT})]
        new += [(f"{k} clusters, {CHOSEN}", {"clusters": k, "reading": CHOSEN}) for k in config.many_clusters if k]
        return [
            Cell(f"{label}, seed {seed}", {"set": name, "seed": seed, **settings}, config.seconds, alone=True)
            for name, repeats in config.sets
            for label, settings in before + new
            for seed in range(repeats)
        ]

    def run(self, cell: Cell, config: TextConfig, context: Context) -> list[Row]:
        task, k, label = self.task(cell, config, context), cell.settings["clusters"], cell.settings.get("reading")
        method = reading(label or PAPERS, k) if k else "exact"
        with sdpa_kernel(SDPBackend.MATH) if label == WRITTEN_OUT else contextlib.nullcontext():
            return [trained(task, method, config, cell.settings["seed"], context)]

    def tables(self, rows: Sequence[Row], config: TextConfig) -> list[Table]:
        table = Table("20NEWS (the paper's | ours)", ["Model", "accuracy, %", "memory, MiB", "seconds per epoch"])
        models = [("Transformer, written out", 0, WRITTEN_OUT), ("Transformer, SDPA", 0, None)]
        models += [(f"k = {k}, {words}", k, label) for label, words in HEADS.items() for k in config.many_clusters if k]
        for words, k, label in models:
            accuracy, memory, seconds = TABLE4[k]
            mine = {"clusters": k, "reading": label}
            table.rows.append(
                [
                    words,
                    beside(accuracy, chosen(rows, "accuracy", **mine), times=100),
                    beside(float(memory), chosen(rows, "memory_mib", **mine), 0),
                    beside(seconds, chosen(rows, "seconds_per_epoch", **mine)),
                ]
            )
        table.notes = [
            "Memory: the most that was allocated while training, model and optimizer with it, on a GPU. "
            "Seconds: the median over the epochs after the first, without judgements; the paper does not "
            "say what its seconds are of."
        ]
        if all(repeats == 1 for _, repeats in config.sets):
            table.notes.append("One run each: accuracies as close as these are not told apart.")
        return [table]

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
        for label, heads in HEADS.items():
            for exact, words in ((None, "SDPA"), (WRITTEN_OUT, "the written out transformer")):
                for place, (key, measured) in enumerate(MEASURED.items()):
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
                            f"ClusterFormer ({heads}) against {words}, {measured}: {say(ours)} (paper: {say(theirs)})."
                        )
        return lines


WRITTEN_OUT = "written out"
HEADS = {None: "one grouping for all heads", CHOSEN: "one for each head"}  # by what rows say of their reading
MEASURED = {"accuracy": "points of accuracy", "memory_mib": "times the memory", "seconds_per_epoch": "times the time"}


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
        """The weights with the first reading, under the names that its rows have, and with the chosen one."""
        return config.methods + tuple(each + WITH_CHOSEN for each in config.methods)

    def run(self, cell: Cell, config: TextConfig, context: Context) -> list[Row]:
        weights, _, label = cell.settings["method"].partition(", ")
        first, _, second = weights.partition("/")
        settings = READINGS[label or PAPERS]
        settings = settings | {"mu": settings["mu"] * (first == "Y"), "nu": settings["nu"] * (second == "Y")}
        method = str(ClusterFormer(clusters=config.clusters, **settings))
        return [trained(self.task(cell, config, context), method, config, cell.settings["seed"], context)]

    def tables(self, rows: Sequence[Row], config: TextConfig) -> list[Table]:
        found = []
        for end, heads in zip(("", WITH_CHOSEN), HEADS.values(), strict=True):
            table = Table(
                f"L1 / L2 with weight (Y) or without (N), {heads}, per cent (the paper's | ours)",
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
        return found

    def differences(self, config: TextConfig) -> list[str]:
        return [
            TRAINED_ON_DEV,
            sizes_note(config, "1 layer of width 300, batches of 128, texts of at most 500 words"),
            LOSSES,
            "Only L1 and L2 train centroids and their projection (attention knows them through an argmax): with N/N "
            "both stay as they were drawn.",
        ]

    def findings(self, rows: Sequence[Row], config: TextConfig) -> list[str]:
        lines = []
        for end, heads in zip(("", WITH_CHOSEN), HEADS.values(), strict=True):
            for name, which, key in self.columns:
                found = apart(rows, key, "Y/Y" + end, "N/N" + end, set=which)
                if found:
                    paper = TABLE5["Y/Y"][name] - TABLE5["N/N"][name]
                    gain, verdict = lead(found)
                    reached = against_paper(verdict, paper)
                    lines.append(
                        f"{which} {key}, {heads}: both losses bring {gain} points (paper {paper:+.1f}): {reached}."
                    )
        return lines


WITH_CHOSEN = f", {CHOSEN}"  # after the weights, in the names of Table 5's cells
EXPERIMENTS: list[Any] = [
    ClusterFormerTable2,
    ClusterFormerTable3,
    ClusterFormerTable4,
    ClusterFormerTable5,
    ClusterFormerFig5,
]
