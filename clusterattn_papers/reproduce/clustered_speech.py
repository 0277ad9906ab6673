"""Clustered attention's speech experiments: Tables 1, 2 and 3, with joined AN4 in the place of WSJ."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from clusterattn._rows import Row
from clusterattn.measure.words import counted

from ._experiment import Cell, Table, apart, beside, chosen, lead, spread
from ._speech import DEEP, HISTORY, PAPER, SMALL, SMOKE, SWEPT, TRAINED, TRAINING, SpeechConfig, Trained, fits

LOSS, DEV_LOSS, ERROR = HISTORY.index("loss"), HISTORY.index("nll"), len(HISTORY)  # places in a line of a history

# Table 1: validation phone error rates in percent, by (evaluated with, trained with); improved is their i-clustered
TABLE1 = {
    (evaluated, trained): float(value)
    for evaluated, line in {
        "full": "5.14 - - - 7.10 5.56",
        "shared-full": "- 6.57 25.16 41.61 - -",
        "lsh-1": "- 71.40 10.43 13.76 - -",
        "lsh-4": "- 64.29 9.35 9.33 - -",
        "clustered-100": "44.88 40.86 68.06 66.43 7.06 18.83",
        "clustered-200": "21.76 25.86 57.75 57.24 6.34 8.95",
        "improved-100": "9.29 13.22 41.65 48.20 8.80 5.95",
        "improved-200": "6.38 8.43 30.09 42.43 7.71 5.60",
        "oracle-top": "17.16 77.18 43.35 59.38 24.32 6.96",
    }.items()
    for trained, value in zip(TRAINED, line.split(), strict=False)
    if value != "-"
}
# Table 2: test phone error rate in percent, seconds an epoch, hours to converge, on a GTX 1080 Ti
TABLE2 = {
    "full": (5.03, 2514.0, 87.99), "lsh-1": (9.43, 1004.0, 189.64), "lsh-4": (8.59, 2320.0, 210.09),
    "clustered-100": (7.50, 803.0, 102.15), "improved-100": (5.61, 1325.0, 72.14),
}  # fmt: skip
# Table 3: Switchboard, word error rate in percent, hours an epoch, hours to converge
TABLE3 = {"full": (15.0, 3.84, 228.05), "clustered-100": (18.5, 1.91, 132.13), "improved-100": (15.5, 2.57, 127.44)}


class Corpus(NamedTuple):
    """What the paper trained with, and how."""

    called: str
    bands: int  # of the filter-bank
    frames: int  # in an input on average
    longest: int
    layers: int
    lr: float
    batches: str


WSJ = Corpus("the Wall Street Journal (81 hours)", 40, 780, 2500, 9, 1e-4, "2 (full) to 14 (clustered)")
SWITCHBOARD = Corpus("Switchboard (2400 telephone calls)", 80, 534, 3850, 12, 2e-4, "2 (full) or 6 (the others)")
DATA = {
    "an4": "CMU AN4 (948 utterances of spelled names and numbers, 38 minutes to train with, 33 phones) takes the place "
           "of {called}. {joined} of {frames} frames on average, {against}. Dev is "
           "every tenth training speaker, test the official one, both joined {judged} times; an epoch is {joinings} "
           "such joinings of the training set.",
    "wsj": "The Wall Street Journal, as a folder wsj of train, dev and test with .wav, a .txt each, and a phone .dic.",
    None: "Speech made up in code takes the place of {called}: it shows that all runs, no more.",
}  # fmt: skip


JOINED = "Utterances are joined at random to inputs"


def common_differences(config: SpeechConfig, theirs: Corpus = WSJ, joined: str = JOINED) -> list[str]:
    most = f"{theirs.frames} (at most {theirs.longest})"
    against = (
        f"as published: {most}"
        if config.frames == theirs.frames
        else f"{'longer' if config.frames > theirs.frames else 'shorter'} than the published {most}"
    )
    data = DATA[config.data].format(
        called=theirs.called,
        joined=joined,
        frames=config.frames,
        against=against,
        judged=config.judged,
        joinings=config.joinings,
    )
    return [
        data,
        *(
            [
                "Inputs are 13 cepstra with first and second differences, as AN4 comes; published: "
                f"{theirs.bands} filter-banks."
            ]
            if config.data == "an4"
            else []
        ),
        f"{config.layers} layers, {config.heads} heads, "
        f"feed-forward {config.feedforward}, R-Adam with lr {config.lr:g} ({config.decay}), "
        + (counted(config.steps, "step") if config.steps else f"at most {counted(config.epochs, 'epoch')}")
        + f" of {config.batch} joined inputs, {config.precision}; published: {theirs.layers} layers, lr {theirs.lr:g}, "
        f"dropped on plateaus, trained to convergence in batches of {theirs.batches}.",
        "The blank's bias starts where one frame in 15 says something"
        + (f", and the first layer sees {config.reach} frames on each side" if config.reach else "")
        + ": with so little data CTC leaves its first plateau slowly without.",
        "refined is ours, not in the paper; improved is the paper's i-clustered.",
    ]


class ClusteredTable1(Trained):
    name = "clustered-table1"
    place = "Table 1"
    about = "speech: train with one attention, evaluate with another: phone error rate"
    scales: ClassVar[dict[str, Any]] = {"smoke": SMOKE, "small": SMALL, "paper": PAPER}

    def shows(self, cell: Cell) -> bool:
        return not cell.alone and not _swept(cell)

    def tables(self, rows: Sequence[Row], config: SpeechConfig) -> list[Table]:
        rows = [row for row in rows if row["layers"] == config.layers]
        columns = ["evaluated with", *(f"trained with {name}" for name in config.trained)]
        errors = Table(
            "Phone error rate on dev in % (the paper's | ours)",
            columns,
            notes=[
                "± is the standard deviation over seeds.",
                "– is left out as in the paper: lsh needs queries that are keys, full attention has keys of its own.",
            ],
        )
        apart = Table(
            "How far each frame's answer is from that of full attention with the same weights (KL, nats; ours)", columns
        )
        for name in config.evaluated:
            cells = [(trained, fits(name, trained)) for trained in config.trained]
            errors.rows.append(
                [
                    name,
                    *(
                        beside(
                            TABLE1.get((name, trained)), chosen(rows, "dev", evaluated=name, trained=trained), 2, 100
                        )
                        if there
                        else "–"
                        for trained, there in cells
                    ),
                ]
            )
            apart.rows.append(
                [
                    name,
                    *(
                        spread(chosen(rows, "kl", evaluated=name, trained=trained), 3) if there else "–"
                        for trained, there in cells
                    ),
                ]
            )
        return [errors, apart]

    def differences(self, config: SpeechConfig) -> list[str]:
        return common_differences(config)

    def findings(self, rows: Sequence[Row], config: SpeechConfig) -> list[str]:
        mine = [{**row, "method": row.get("evaluated")} for row in rows if row["layers"] == config.layers]

        def ours(key: str, one: str, other: str) -> str:
            return _columns({name: apart(mine, key, one, other, trained=name) for name in config.trained})

        lines = []
        for one, other in RIVALS:
            theirs = _columns(
                {
                    name: [TABLE1[one, name] - TABLE1[other, name]]
                    for name in TRAINED
                    if {(one, name), (other, name)} <= TABLE1.keys()
                }
            )
            verdicts = {
                "by distance from full attention": ours("kl", one, other),
                "by error rate": ours("dev", one, other),
            }
            if all(verdicts.values()):
                verdicts |= {"in the paper, by error rate,": theirs} if theirs else {}
                lines.append(f"{one} against {other}: {'; '.join(f'{by} {each}' for by, each in verdicts.items())}.")
        return lines


def _columns(differences: Mapping[str, Sequence[float]]) -> str:
    """ "ahead in 4 of 7 columns (behind when trained with lsh-1)": from the errors of one less those of another."""
    columns: dict[str, list[str]] = {"ahead": [], "behind": [], "not told apart": []}
    for name, each in differences.items():
        if each:
            columns[verdict_of(each)].append(name)
    count, ahead = sum(map(len, columns.values())), len(columns.pop("ahead"))
    rest = "; ".join(f"{verdict} when trained with {', '.join(names)}" for verdict, names in columns.items() if names)
    return f"ahead in {ahead} of {count} columns{f' ({rest})' if rest else ''}" if count else ""


def verdict_of(more: Sequence[float]) -> str:
    """Of the errors of one less those of another, by seed; from a single run by its sign."""
    return lead(more, less_is_better=True)[1] or ("ahead" if more[0] < 0 else "behind")


RIVALS = [(f"improved-{c}", f"clustered-{c}") for c in (100, 200)]
RIVALS += [("improved-100", "lsh-1"), ("improved-100", "lsh-4"), ("improved-100", "oracle-top")]
RIVALS += [(f"refined-{c}", f"improved-{c}") for c in (100, 200)]


def _swept(cell: Cell) -> bool:
    """Is it there for Figure 1 alone?"""
    return any((cell.settings["trained"], cell.settings["layers"]) in swept for swept in SWEPT.values())


class Shown(Trained):
    """Another view of Table 1's models."""

    rows_from = "clustered-table1"
    scales: ClassVar[dict[str, Any]] = ClusteredTable1.scales

    def shows(self, cell: Cell) -> bool:
        return not _swept(cell)

    def differences(self, config: SpeechConfig) -> list[str]:
        return [*common_differences(config), *times_note(config)]


def times_note(config: SpeechConfig) -> list[str]:
    return [
        f"Times are computed: the pass over a batch of {config.batch} × {config.frames} frames, measured with nothing "
        "beside it (on a GPU replayed as a CUDA graph), times the number of updates; the loss and the optimizer's step "
        "are left out. Models may train several at a time (--jobs), their clocks tell nothing.",
        "Full attention is today's fused kernel, not that of 2020.",
    ]


def pace(rows: Sequence[Row], name: str, layers: int, which: str = TRAINING) -> float | None:
    """Seconds of a pass, where it was measured and fits into memory."""
    return next(iter(chosen(rows, "seconds", trained=name, layers=layers, **{"pass": which})), None)


class ClusteredTable2(Shown):
    name = "clustered-table2"
    place = "Table 2"
    about = "speech: phone error rate on test, time per epoch, time to converge"

    def tables(self, rows: Sequence[Row], config: SpeechConfig) -> list[Table]:
        return [trained_table(rows, config, TABLE2, "phone error rate on test, %", ("s", "h"), (1.0, 1 / 3600))]

    def findings(self, rows: Sequence[Row], config: SpeechConfig) -> list[str]:
        return trained_findings(rows, config, TABLE2)


def trained_table(
    rows: Sequence[Row],
    config: SpeechConfig,
    published: dict[str, tuple[float, float, float]],
    error: str,
    units: tuple[str, str],
    factors: tuple[float, float],
) -> Table:
    """Error, time per epoch and time to the best weights of models evaluated with what trained them."""
    table = Table(
        "Training to the end (the paper's | ours)",
        [
            "",
            error,
            f"time per epoch, {units[0]}",
            f"time to the best weights, {units[1]}",
            "dev loss then, nats (ours)",
        ],
    )
    for name in config.trained:
        mine = of_its_own(rows, config, name)
        theirs = published.get(name, (None, None, None))
        each = pace(rows, name, config.layers)
        times = [] if each is None else [(each * per_epoch(row), each * best_step(row)) for row in mine]
        table.rows.append(
            [
                name,
                beside(theirs[0], chosen(mine, "test"), 2, 100),
                beside(theirs[1], [epoch for epoch, _ in times], 2 if factors[0] == 1 else 4, factors[0]),
                beside(theirs[2], [best for _, best in times], 4, factors[1]),
                spread([best_line(row)[DEV_LOSS] for row in mine], 3),
            ]
        )
    return table


def per_epoch(row: Row) -> float:
    """Updates."""
    return float(row["steps"] * row["seconds_per_epoch"] / row["seconds"])


def best_line(row: Row) -> list[float]:
    """The line of a history with the least errors on dev: its weights are kept."""
    line: list[float] = min(row["history"], key=lambda line: line[ERROR])
    return line


def best_step(row: Row) -> int:
    return int(best_line(row)[HISTORY.index("step")])


def of_its_own(rows: Sequence[Row], config: SpeechConfig, name: str) -> list[Row]:
    """A row for each seed of a model that is evaluated with what trained it."""
    return [row for row in rows if row["trained"] == row.get("evaluated") == name and row["layers"] == config.layers]


COMPARED = [("improved-100", "full"), ("improved-100", "clustered-100"), ("clustered-100", "lsh-1"),
            ("clustered-100", "lsh-4"), ("refined-100", "full"), ("refined-100", "improved-100")]  # fmt: skip


def trained_findings(
    rows: Sequence[Row], config: SpeechConfig, published: dict[str, tuple[float, float, float]]
) -> list[str]:
    """Errors by seed, and whether improved is faster than full."""
    tested = [{**row, "method": name} for name in config.trained for row in of_its_own(rows, config, name)]
    lines = []
    for one, other in COMPARED:
        if more := apart(tested, "test", one, other):
            theirs = published[one][0] - published[other][0] if one in published and other in published else None
            text, verdict = lead(more, 2, less_is_better=True)
            reading = _against_paper(verdict, more, theirs)
            lines.append(f"{one} against {other}, points of error rate on test: {text} ({reading}).")
    full, improved = (pace(rows, name, config.layers) for name in ("full", "improved-100"))
    if full is not None and improved is not None:
        theirs = published["full"][1] / published["improved-100"][1]
        lines.append(
            f"An update with improved-100 is {full / improved:.2f} times as fast as with full; in the paper, "
            f"with the attention of 2020, an epoch is {theirs:.2f} times as fast."
        )
    return lines


def _against_paper(verdict: str, ours: Sequence[float], theirs: float | None) -> str:
    parts = [verdict or "one run"]
    if theirs is not None:
        parts.append(f"the paper's {theirs:+.2f}")
        if theirs * statistics.fmean(ours) < 0 and verdict != "not told apart":
            parts.append("the other way round")
    return ", ".join(parts)


class ClusteredTable3(Trained):
    name = "clustered-table3"
    place = "Table 3"
    about = "speech, its shape only: 12 layers and longer inputs: error rate, time per epoch, time to converge"
    cannot = (
        "Switchboard is under licence, and lattice-free MMI needs Kaldi's graphs: neither can be had. What runs "
        "is its shape, with CTC on AN4: 12 layers, longer inputs"
    )
    scales: ClassVar[dict[str, Any]] = {
        "smoke": replace(SMOKE, trained=DEEP, evaluated=(), also=(), layers=2, frames=90),
        "small": replace(SMALL, trained=DEEP, evaluated=(), also=(), seeds=(0,), layers=12, frames=1500, batch=4,
                         steps=2000, lr=1e-3, seconds=150.0),
        "paper": replace(PAPER, trained=DEEP, evaluated=(), also=(), data="an4", layers=12, frames=1500, batch=6,
                         lr=2e-4),
    }  # fmt: skip

    def tables(self, rows: Sequence[Row], config: SpeechConfig) -> list[Table]:
        table = trained_table(
            rows,
            config,
            TABLE3,
            "word error rate (theirs) | phone error rate (ours), %",
            ("h", "h"),
            (1 / 3600, 1 / 3600),
        )
        table.notes.append("Words of telephone calls and phones of spelled names: only orders can be compared.")
        return [table]

    def findings(self, rows: Sequence[Row], config: SpeechConfig) -> list[str]:
        return trained_findings(rows, config, TABLE3)

    def differences(self, config: SpeechConfig) -> list[str]:
        return [
            "The paper's Table 3 is Switchboard with lattice-free MMI, on several GPUs, and word error rates.",
            *common_differences(config, SWITCHBOARD),
            *times_note(config),
        ]


EXPERIMENTS: list[Any] = [ClusteredTable1, ClusteredTable2, ClusteredTable3]
