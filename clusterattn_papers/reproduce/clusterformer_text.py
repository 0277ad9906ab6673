"""ClusterFormer against the others on sentences, newsgroups and pairs of sentences: Tables 2 and 3, Figure 5."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, ClassVar

from clusterattn._rows import Row
from clusterattn.measure import plots

from ._experiment import Table, apart, beside, chosen, spread
from ._readings import NEW, PAPERS, READINGS, in_paper
from ._texts import (
    BUDGET,
    LOSSES,
    OURS,
    SAYS,
    TextConfig,
    TextExperiment,
    best_reading,
    compared,
    sizes_note,
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
    readings = NEW
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
        return [table, *self.groupings(rows, config)]

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
        return [table, *self.groupings(rows, config)]

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


EXPERIMENTS: list[Any] = [ClusterFormerTable2, ClusterFormerTable3, ClusterFormerFig5]
