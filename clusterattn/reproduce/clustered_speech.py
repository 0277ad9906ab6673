"""Clustered attention's speech experiments: Tables 1, 2, 3 and Figures 1, 7, with joined AN4 in the place of WSJ."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..measure import plots
from ..measure.rows import Row
from ..methods import method as as_method
from ..models import attending_with
from ..tasks import Batch, batches
from ..tasks.speech import Recording, Speech, joined, mistakes
from ..train import Settings, fit
from ..train.loop import moved
from ._experiment import Cell, Context, Experiment, Table, beside, chosen, spread

SHARED = ("shared-full", "lsh-1", "lsh-4")  # queries are keys
TRAINED = ("full", "shared-full", "lsh-1", "lsh-4", "clustered-100", "improved-100", "refined-100")
EVALUATED = (
    "full", "shared-full", "lsh-1", "lsh-4", "clustered-100", "clustered-200", "improved-100", "improved-200",
    "refined-100", "refined-200", "oracle-top",
)  # fmt: skip

DEEP = ("full", "clustered-100", "improved-100", "refined-100")

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


def spec(name: str, top: int = 32) -> str:
    """A method from the tables' short names: lsh-4, improved-100, ..."""
    kind, _, number = name.partition("-")
    fixed = {"full": "exact", "shared-full": "exact", "oracle-top": f"oracle_top:top={top}"}
    if name in fixed:
        return fixed[name]
    if kind == "lsh":
        return f"reformer:rounds={number},chunk=32"
    return f"{kind}:clusters={number}" + ("" if kind == "clustered" else f",top={top}")


def fits(evaluated: str, trained: str) -> bool:
    """LSH needs queries that are keys; full attention is called shared where they are."""
    if evaluated in ("full", *SHARED):
        return (evaluated in SHARED) == (trained in SHARED)
    return True


@dataclass(frozen=True)
class Config:
    """``also``: (trained, layers), further models for the speed-accuracy figure, with one seed."""

    data: str | None = "an4"  # None: speech made up in code
    trained: tuple[str, ...] = TRAINED
    evaluated: tuple[str, ...] = EVALUATED
    also: tuple[tuple[str, int], ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    frames: int = 780  # the mean of the joined inputs
    joinings: int = 8
    judged: int = 3
    layers: int = 4
    dim: int = 192
    heads: int = 6
    feedforward: int = 768
    dropout: float = 0.1
    reach: int = 0  # frames on each side that the first layer sees; 2 leaves the plateau sooner, 0 is as published
    hidden: float = 0.0
    top: int = 32
    steps: int | None = 4000
    epochs: int = 10
    evaluate: int | None = 250
    batch: int = 8
    lr: float = 1.5e-3
    warmup: int = 0
    decay: str = "linear"
    precision: str = "bf16"
    patience: int | None = None
    seconds: float = 120.0


SMALL = Config(seeds=(0,), steps=3000)
PAPER = Config(
    also=(("full", 4), ("full", 6), ("improved-100", 6), ("improved-200", 6), ("improved-200", 9),
          ("clustered-200", 9), ("clustered-300", 9)),
    data="wsj", seeds=(0,), joinings=1, judged=1, layers=9, steps=None, epochs=200, evaluate=None, batch=10,
    lr=1e-4, decay="plateau", precision="no", patience=20, seconds=300_000.0,
)  # fmt: skip
SMOKE = Config(
    data=None, also=(("full", 2),), seeds=(0,), frames=40, joinings=1, judged=1, layers=1, dim=24, heads=2,
    feedforward=32, top=4, steps=2, evaluate=1, batch=4, precision="no", seconds=1.0,
)  # fmt: skip


def task_of(config: Config, context: Context, seed: int) -> Speech:
    if config.data is None:
        return invented(config.frames, config.joinings, seed)
    if config.data == "an4":
        return Speech.an4(
            context.folder("an4"), frames=config.frames, joinings=config.joinings, judged=config.judged, seed=seed
        )
    return Speech.read(context.folder(config.data))  # a user's own .wav and .txt


def invented(frames: int, joinings: int, seed: int = 0) -> Speech:
    """Three phones, each a direction in feature space held for six frames, then two of silence."""
    dice = torch.Generator().manual_seed(0)
    said = [torch.randint(3, (2,), generator=dice) for _ in range(24)]
    held = torch.tensor([1.0] * 6 + [0.0] * 2).repeat(2).unsqueeze(1)
    heard = [torch.eye(5)[each].repeat_interleave(8, 0) * held for each in said]
    spoken = [Recording(each + 0.1 * torch.randn(16, 5, generator=dice), phones)
              for each, phones in zip(heard, said, strict=True)]  # fmt: skip
    splits: dict[str, Sequence[Recording]] = {
        "train": joined(spoken[:16], frames, joinings, seed), "dev": joined(spoken[16:20], frames, 1, 0),
        "test": joined(spoken[20:], frames, 1, 0),
    }  # fmt: skip
    return Speech(splits, ["AA", "IY", "UW"], features=5, length=frames)


class Trained(Experiment):
    """What the tables share: a cell is one trained model and all its evaluations, one row for each of these."""

    needs = ("an4",)

    def cells(self, config: Config) -> list[Cell]:
        wanted = [(name, config.layers, seed) for seed in config.seeds for name in config.trained]
        wanted += [(name, layers, config.seeds[0]) for name, layers in config.also]
        slow = {"full": 1.0, "shared-full": 1.0, "lsh-1": 1.2}
        return [
            Cell(f"{name}, {layers} layers, seed {seed}", {"trained": name, "layers": layers, "seed": seed},
                 config.seconds * slow.get(name, 1.5) * layers / config.layers)
            for name, layers, seed in wanted
        ]  # fmt: skip

    def run(self, cell: Cell, config: Config, context: Context) -> list[Row]:
        name, layers, seed = (cell.settings[key] for key in ("trained", "layers", "seed"))
        task = task_of(config, context, seed)
        torch.manual_seed(seed)
        model = task.model(
            spec(name, config.top), dim=config.dim, heads=config.heads, layers=layers, feedforward=config.feedforward,
            dropout=config.dropout, reach=config.reach, hidden=config.hidden, shared_qk=name in SHARED,
        )  # fmt: skip
        settings = Settings(
            steps=config.steps, epochs=config.epochs, batch=config.batch, lr=config.lr, warmup=config.warmup,
            decay=config.decay, precision=config.precision, patience=config.patience, evaluate=config.evaluate,
            judge_batch=JUDGED_AT_ONCE, seed=seed,
        )  # fmt: skip
        fitted = fit(task, model, settings, folder=context.work, device=context.device, tick=context.tick)
        main = layers == config.layers and name in config.trained
        others = [each for each in config.evaluated if fits(each, name)] if main else []
        whole = "shared-full" if name in SHARED else "full"
        rows = evaluated(task, fitted.model, whole, [name, *others], config.top, context.device)
        lines = fitted.history[:: -(-len(fitted.history) // 60)]
        best = min(fitted.history, key=lambda line: line[task.figure])
        rows[0] |= {
            "steps": fitted.steps, "seconds": round(fitted.seconds, 2), "best_seconds": best["seconds"],
            "seconds_per_epoch": round(fitted.seconds_per_epoch, 3),
            "history": [[round(line[key], 4) for key in (*HISTORY, task.figure)] for line in lines],
        }  # fmt: skip
        return rows


JUDGED_AT_ONCE = 16
HISTORY = ("step", "seconds", "loss", "nll")  # and the error rate


@torch.no_grad()
def evaluated(task: Speech, model: nn.Module, whole: str, names: Sequence[str], top: int, device: torch.device
              ) -> list[Row]:  # fmt: skip
    """A row for every attention that the model is evaluated with, the first being its own.

    dev, test   symbol error rates
    kl          how far the answer of each frame of dev lies from that of full attention with the same weights, in nats
    forward_ms  the fastest of some passes over the middle batch of dev, by length
    """
    model.eval()
    sets = {split: [moved(each, device) for each in batches(task, split, JUDGED_AT_ONCE)] for split in ("dev", "test")}
    truth = _with(model, whole, top, sets["dev"])
    rows = []
    for name in dict.fromkeys(names):
        found = {split: _with(model, name, top, each) for split, each in sets.items()}
        row: Row = {"evaluated": name, "kl": _kl(truth, found["dev"], sets["dev"])}
        for split, logits in found.items():
            wrong = sum(map(mistakes, logits, sets[split]))
            row[split] = wrong / sum(int(batch["said"].sum()) for batch in sets[split])
        row["forward_ms"] = 1e3 * _fastest(model, spec(name, top), sets["dev"][len(sets["dev"]) // 2], device)
        rows.append(row)
    return rows


def _with(model: nn.Module, name: str, top: int, given: Sequence[Batch]) -> list[Tensor]:
    with attending_with(model, spec(name, top)):
        return [model(batch["frames"], batch["mask"]).logits.float() for batch in given]


def _kl(truth: Sequence[Tensor], ours: Sequence[Tensor], given: Sequence[Batch]) -> float:
    total = frames = 0.0
    for one, other, batch in zip(truth, ours, given, strict=True):
        wanted, got = one.log_softmax(-1), other.log_softmax(-1)
        total += float(((wanted.exp() * (wanted - got)).sum(-1) * batch["mask"]).sum())
        frames += float(batch["mask"].sum())
    return total / frames


def _fastest(model: nn.Module, method: str, batch: Batch, device: torch.device, times: int = 5) -> float:
    found = []
    with attending_with(model, method):
        for _ in range(times):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            model(batch["frames"], batch["mask"])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - started)
    return min(found)


DATA = {
    "an4": "CMU AN4 (948 utterances of spelled names and numbers, 38 minutes to train with, 33 phones) takes the place "
           "of the Wall Street Journal (81 hours). Utterances are joined at random to inputs of {frames} frames on "
           "average. Dev is every tenth training speaker, test the official one, both joined {judged} times; an epoch "
           "is {joinings} such joinings of the training set.",
    "wsj": "The Wall Street Journal, as a folder wsj of train, dev and test with .wav, a .txt each, and a phone .dic.",
    None: "Speech made up in code takes the place of the Wall Street Journal: it shows that all runs, no more.",
}  # fmt: skip


def common_differences(config: Config) -> list[str]:
    published = "published: 9 layers, lr 0.0001, dropped on plateaus, trained to convergence in the largest batches"
    return [
        DATA[config.data].format(frames=config.frames, judged=config.judged, joinings=config.joinings),
        *(["Inputs are 13 cepstra with first and second differences, as AN4 comes; published: 40 filter-banks."]
          if config.data == "an4" else []),
        f"{config.layers} layers, {config.heads} heads, "
        f"feed-forward {config.feedforward}, R-Adam with lr {config.lr:g} ({config.decay}), "
        + (f"{config.steps} steps" if config.steps else f"at most {config.epochs} epochs")
        + f" of {config.batch} joined inputs, {config.precision}; {published} that fit.",
        "The blank's bias starts where one frame in 15 says something"
        + (f", and the first layer sees {config.reach} frames on each side" if config.reach else "")
        + ": with so little data CTC leaves its first plateau slowly without.",
        "refined is ours, not in the paper; improved is the paper's i-clustered.",
    ]  # fmt: skip


class Table1(Trained):
    name = "clustered-table1"
    place = "Table 1"
    about = "speech: train with one attention, evaluate with another: phone error rate"
    scales: ClassVar[dict[str, Any]] = {"smoke": SMOKE, "small": SMALL, "paper": PAPER}

    def tables(self, rows: Sequence[Row], config: Config) -> list[Table]:
        rows = [row for row in rows if row["layers"] == config.layers]
        columns = ["evaluated with", *(f"trained with {name}" for name in config.trained)]
        errors = Table(
            "Phone error rate on dev in % (the paper's | ours)", columns,
            notes=["± is the standard deviation over seeds.", "– is left out as in the paper: lsh needs queries that "
                   "are keys, full attention has keys of its own."],
        )  # fmt: skip
        apart = Table(
            "How far each frame's answer is from that of full attention with the same weights (KL, nats; ours)", columns
        )
        for name in config.evaluated:
            cells = [(trained, fits(name, trained)) for trained in config.trained]
            errors.rows.append([name, *(
                beside(TABLE1.get((name, trained)), chosen(rows, "dev", evaluated=name, trained=trained), 2, 100)
                if there else "–" for trained, there in cells
            )])  # fmt: skip
            apart.rows.append([name, *(
                spread(chosen(rows, "kl", evaluated=name, trained=trained), 3) if there else "–"
                for trained, there in cells
            )])  # fmt: skip
        return [errors, apart]

    def differences(self, config: Config) -> list[str]:
        return common_differences(config)

    def findings(self, rows: Sequence[Row], config: Config) -> list[str]:
        mine = [row for row in rows if row["layers"] == config.layers]
        cells = [(name, trained) for name in config.evaluated for trained in config.trained]

        def means(key: str) -> dict[tuple[str, str], float]:
            found = {cell: chosen(mine, key, evaluated=cell[0], trained=cell[1]) for cell in cells}
            return {cell: statistics.fmean(each) for cell, each in found.items() if each}

        measures = {"by error rate": means("dev"), "by distance from full attention": means("kl")}
        lines = []
        for one, other in RIVALS:
            ours = [f"{_ahead(one, other, values)} {words}" for words, values in measures.items() if values]
            theirs = _ahead(one, other, TABLE1)
            if ours:
                paper = f"; in the paper in {theirs} by error rate" if theirs else ""
                lines.append(f"{one} is ahead of {other} in {', in '.join(ours)}{paper}.")
        return lines


def _ahead(one: str, other: str, values: dict[tuple[str, str], float]) -> str:
    """In how many columns, and where not."""
    won = {trained: values[one, trained] < values[name, trained] for name, trained in values
           if name == other and (one, trained) in values}  # fmt: skip
    lost = [trained for trained, ahead in won.items() if not ahead]
    told = f" (not when trained with {', '.join(lost)})" if lost else ""
    return f"{sum(won.values())} of {len(won)} columns{told}" if won else ""


RIVALS = [(f"improved-{c}", f"clustered-{c}") for c in (100, 200)]
RIVALS += [("improved-100", "lsh-1"), ("improved-100", "lsh-4"), ("improved-100", "oracle-top")]
RIVALS += [(f"refined-{c}", f"improved-{c}") for c in (100, 200)]


class Shown(Trained):
    """Another view of Table 1's models."""

    rows_from = "clustered-table1"
    scales: ClassVar[dict[str, Any]] = Table1.scales

    def differences(self, config: Config) -> list[str]:
        return [*common_differences(config), TIMES]


TIMES = ("Times are of models that may have shared one GPU with others (--jobs): --jobs 1 gives clean ones. Full "
         "attention is today's fused kernel, not that of 2020.")  # fmt: skip


class Table2(Shown):
    name = "clustered-table2"
    place = "Table 2"
    about = "speech: phone error rate on test, time per epoch, time to converge"

    def tables(self, rows: Sequence[Row], config: Config) -> list[Table]:
        return [trained_table(rows, config, TABLE2, "phone error rate on test, %", ("s", "h"), (1.0, 1 / 3600))]


def trained_table(
    rows: Sequence[Row], config: Config, published: dict[str, tuple[float, float, float]], error: str,
    units: tuple[str, str], factors: tuple[float, float],
) -> Table:  # fmt: skip
    """Error, time per epoch and time to the best weights of models evaluated with what trained them."""
    table = Table("Training to the end (the paper's | ours)",
                  ["", error, f"time per epoch, {units[0]}", f"time to the best weights, {units[1]}"])  # fmt: skip
    for name in config.trained:
        mine = [row for row in rows if row["trained"] == row["evaluated"] == name and row["layers"] == config.layers]
        theirs = published.get(name, (None, None, None))
        table.rows.append([
            name, beside(theirs[0], chosen(mine, "test"), 2, 100),
            beside(theirs[1], chosen(mine, "seconds_per_epoch"), 2, factors[0]),
            beside(theirs[2], chosen(mine, "best_seconds"), 3, factors[1]),
        ])  # fmt: skip
    return table


class Figure1(Shown):
    name = "clustered-fig1"
    place = "Figure 1"
    about = "speech: phone error rate against the time of a forward pass"

    def points(self, rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
        """The rows of every model, evaluated with what trained it."""
        found: dict[tuple[str, int], list[Row]] = {}
        for row in rows:
            if row["trained"] == row["evaluated"]:
                found.setdefault((row["trained"], row["layers"]), []).append(row)
        return found

    def tables(self, rows: Sequence[Row], config: Config) -> list[Table]:
        table = Table("Speed against accuracy (ours)", ["trained with", "layers", "forward, ms", "phone error rate, %"],
                      notes=["The paper prints no numbers beside its Figure 1."])  # fmt: skip
        for (name, layers), each in sorted(self.points(rows).items()):
            cost, error = spread(chosen(each, "forward_ms")), spread(chosen(each, "dev"), 2, 100)
            table.rows.append([name, str(layers), cost, error])
        return [table]

    def picture(self, rows: Sequence[Row], config: Config) -> bytes | None:
        if not rows:
            return None
        with plots.rules():
            figure = plots.canvas(6.4, 4.2)
            axis = figure.subplots()
            for (name, layers), each in self.points(rows).items():
                time, error = (statistics.fmean(chosen(each, key)) for key in ("forward_ms", "dev"))
                colour, marker = look(name)
                axis.scatter([time], [100 * error], color=colour, marker=marker, s=45)
                axis.annotate(f"{name}, {layers} layers", (time, 100 * error), xytext=(5, 4), fontsize=7,
                              textcoords="offset points", color=colour)  # fmt: skip
            axis.set(xlabel="time of a forward pass, ms", ylabel="phone error rate, %", title="Speed against accuracy")
            axis.grid(True)
            return plots.as_png(figure)


def look(name: str) -> tuple[str, str]:
    colour, marker = plots.style_of(as_method(spec(name)).name)
    return ("#7F7F7F", marker) if name == "shared-full" else (colour, marker)


class Figure7(Shown):
    name = "clustered-fig7"
    place = "Figure 7"
    about = "speech: convergence by steps and by wall clock"

    def tables(self, rows: Sequence[Row], config: Config) -> list[Table]:
        columns = ["trained with", "a third", "two thirds", "end"]
        table = Table("Training loss on the way (nats per phone; ours)", columns,
                      notes=["The paper shows curves without numbers."])  # fmt: skip
        for name in config.trained:
            lines = [row["history"] for row in self.told(rows, config, name)]
            at = [[line[(len(line) - 1) * third // 3][LOSS] for line in lines] for third in (1, 2, 3)]
            table.rows.append([name, *(spread(each, 3) for each in at)])
        return [table]

    def told(self, rows: Sequence[Row], config: Config, name: str) -> list[Row]:
        return [row for row in rows if row.get("history") and row["trained"] == name and row["layers"] == config.layers]

    def picture(self, rows: Sequence[Row], config: Config) -> bytes | None:
        if not rows:
            return None
        with plots.rules():
            figure = plots.canvas(9.5, 3.8)
            axes = figure.subplots(1, 2, sharey=True)
            for name in config.trained:
                colour, _ = look(name)
                for number, row in enumerate(self.told(rows, config, name)):
                    for axis, key in zip(axes, ("step", "seconds"), strict=True):
                        axis.plot([line[HISTORY.index(key)] for line in row["history"]],
                                  [line[LOSS] for line in row["history"]], color=colour, linewidth=1.2,
                                  linestyle="--" if name.endswith("-4") or name == "shared-full" else "-",
                                  label=None if number else name)  # fmt: skip
            axes[0].set(xlabel="updates", ylabel="training loss, nats per phone", title="Convergence by updates")
            axes[1].set(xlabel="seconds", title="Convergence by wall clock")
            for axis in axes:
                axis.grid(True)
            axes[1].legend(fontsize=8)
            return plots.as_png(figure)


LOSS = HISTORY.index("loss")


class Table3(Trained):
    name = "clustered-table3"
    place = "Table 3"
    about = "speech, its shape only: 12 layers and longer inputs: error rate, time per epoch, time to converge"
    cannot = ("Switchboard is under licence, and lattice-free MMI needs Kaldi's graphs: neither can be had. What runs "
              "is its shape, with CTC on AN4: 12 layers, longer inputs")  # fmt: skip
    scales: ClassVar[dict[str, Any]] = {
        "smoke": replace(SMOKE, trained=DEEP, evaluated=(), also=(), layers=2, frames=90),
        "small": replace(SMALL, trained=DEEP, evaluated=(), also=(), seeds=(0,), layers=12, frames=1500, batch=4,
                         steps=2000, lr=1e-3, seconds=150.0),
        "paper": replace(PAPER, trained=DEEP, evaluated=(), also=(), data="an4", layers=12, frames=1500, batch=6,
                         lr=2e-4),
    }  # fmt: skip

    def tables(self, rows: Sequence[Row], config: Config) -> list[Table]:
        table = trained_table(rows, config, TABLE3, "word error rate (theirs) | phone error rate (ours), %", ("h", "h"),
                              (1 / 3600, 1 / 3600))  # fmt: skip
        table.notes.append("Words of telephone calls and phones of spelled names: only orders can be compared.")
        return [table]

    def differences(self, config: Config) -> list[str]:
        return ["The paper's Table 3 is Switchboard with lattice-free MMI and word error rates.",
                *common_differences(config), TIMES]  # fmt: skip


EXPERIMENTS: list[Any] = [Table1, Table2, Table3, Figure1, Figure7]
