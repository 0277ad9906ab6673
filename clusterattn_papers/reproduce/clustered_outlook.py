"""Clustered attention's outlook (its last section): masked language modelling of texts longer than 512 tokens."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from clusterattn._rows import Row
from clusterattn.measure import plots

from ..models.masked import MaskedLM
from ..tasks.masked import Masked, published
from ..train import Settings, fit
from ._experiment import Cell, Context, Experiment, Table, apart, lead, pinned, spread
from ._pace import casting, forward_backward, measured
from .clusterformer_table8 import invented

FULL, SHORT = "full", "full, short"  # short: what pretrained models see
HISTORY = ("step", "loss", "nll")
PACE_SECONDS = 0.2


def _methods(clusters: int, top: int, rounds: int, seats: int) -> tuple[tuple[str, str], ...]:
    return (
        (SHORT, "exact"),
        (FULL, "exact"),
        (f"improved-{clusters}", f"improved:clusters={clusters},top={top}"),
        (f"refined-{clusters}", f"refined:clusters={clusters},top={top}"),
        (f"smyrf {rounds} × {seats}", f"smyrf:rounds={rounds},q_seats={seats},k_seats={seats}"),
    )


@dataclass(frozen=True)
class LongTextConfig:
    """A batch has ``tokens`` tokens, whatever the length of its inputs, so that all models read as much."""

    invented: bool = False
    methods: tuple[tuple[str, str], ...] = _methods(100, 32, 4, 64)
    length: int = 2048
    short: int = 512
    seeds: tuple[int, ...] = (0, 1, 2)
    dim: int = 256
    heads: int = 4
    layers: int = 4
    vocabulary: int = 8000
    steps: int = 4000
    tokens: int = 16384
    lr: float = 1e-3
    precision: str = "bf16"
    seconds: float = 150.0


class ClusteredOutlook(Experiment):
    name = "clustered-outlook"
    place = "Outlook"
    about = "masked language modelling of 2 048 tokens: full, improved, refined, smyrf; and full with 512; needs enwik8"
    needs = ("gutenberg",)  # and enwik8, which is one file
    scales: ClassVar[dict[str, Any]] = {
        "smoke": LongTextConfig(
            invented=True, methods=_methods(4, 4, 2, 8), length=60, short=30, seeds=(0,), dim=16, heads=2, layers=1,
            vocabulary=60, steps=4, tokens=240, precision="no", seconds=1.0,
        ),
        "small": LongTextConfig(seeds=(0,)),
        "paper": LongTextConfig(
            length=8192, dim=512, heads=8, layers=8, vocabulary=30_522, steps=100_000, tokens=131_072, lr=5e-4,
            seconds=100_000.0,
        ),
    }  # fmt: skip

    def cells(self, config: LongTextConfig) -> list[Cell]:
        trained = [
            Cell(f"{name}, seed {seed}", {"method": name, "spec": spec, "seed": seed}, config.seconds)
            for seed in config.seeds
            for name, spec in config.methods
        ]
        paces = [
            Cell(f"pace of {name}", {"method": name, "spec": spec, "pace": True}, alone=True)
            for name, spec in config.methods
        ]
        return trained + paces

    def run(self, cell: Cell, config: LongTextConfig, context: Context) -> list[Row]:
        length = config.short if cell.settings["method"] == SHORT else config.length
        if "pace" in cell.settings:
            return [_pace(cell.settings["spec"], length, config, context.device)]
        seed = cell.settings["seed"]
        documents = invented(words=4000) if config.invented else published(context.data)
        task = Masked(documents, vocabulary=config.vocabulary, length=length)
        torch.manual_seed(seed)
        model = task.model(pinned(cell.settings["spec"]), dim=config.dim, heads=config.heads, layers=config.layers)
        settings = Settings(
            steps=config.steps,
            batch=max(config.tokens // length, 1),
            judge_batch=max(config.tokens // length, 1),
            optimizer="adamw",
            lr=config.lr,
            warmup=config.steps // 12,
            decay="linear",
            clip=1.0,
            precision=config.precision,
            evaluate=max(config.steps // 8, 1),
            graphs=True,
            seed=seed,
        )
        fitted = fit(task, model, settings, folder=context.work, device=context.device, tick=context.tick)
        return [
            {
                **fitted.best,
                "length": length,
                "steps": fitted.steps,
                "history": [[round(line[key], 4) for key in HISTORY] for line in fitted.history],
            }
        ]

    def tables(self, rows: Sequence[Row], config: LongTextConfig) -> list[Table]:
        table = Table(
            f"Hidden words of inputs of {config.length} tokens (ours: the paper trains none)",
            ["Attention", "nats a word", "right, %", "what follows right, %", "ms of an update", "memory, MiB"],
            notes=[
                f"± is the standard deviation over seeds. {SHORT}: inputs of {config.short} tokens, as many tokens in "
                "a batch. Time and memory are those of a forward and a backward pass, measured with nothing beside it."
            ],
        )
        for name, _ in config.methods:
            mine = [row for row in rows if row["method"] == name]
            paces = [row for row in mine if "pace" in row and "seconds" in row]
            table.rows.append(
                [
                    f"{name} ({config.short})" if name == SHORT else name,
                    spread(_of(mine, "nll"), 3),
                    spread(_of(mine, "accuracy"), 1, 100),
                    spread(_of(mine, "next_accuracy"), 1, 100),
                    spread(_of(paces, "seconds"), 2, 1000),
                    spread([row["memory_bytes"] for row in paces], 0, 2**-20),
                ]
            )
        return [table]

    def picture(self, rows: Sequence[Row], config: LongTextConfig) -> bytes | None:
        curves = [row for row in rows if "history" in row]
        if not curves:
            return None
        with plots.rules():
            figure = plots.canvas(8.4, 3.8)
            axes = figure.subplots()
            for name, _ in config.methods:
                colour, marker = plots.style_of(name.replace(SHORT, FULL))
                for at, row in enumerate(each for each in curves if each["method"] == name):
                    axes.plot(
                        [line[HISTORY.index("step")] for line in row["history"]],
                        [line[HISTORY.index("nll")] for line in row["history"]],
                        color=colour,
                        marker=marker,
                        ms=4,
                        lw=1.2,
                        ls=":" if name == SHORT else "-",
                        label=None if at else f"{FULL}, {config.short} tokens" if name == SHORT else plots.short(name),
                    )
            axes.set(xlabel="updates", ylabel="nats a hidden word, dev", title=f"Inputs of {config.length} tokens")
            axes.grid(True)
            figure.legend(loc="outside right upper")
            return plots.as_png(figure)

    def differences(self, config: LongTextConfig) -> list[str]:
        text = (
            "words made up in code"
            if config.invented
            else "enwik8, or its beginning, without its markup, and ten books"
        )
        return [
            "The paper names masked language modelling of long texts as what comes next and trains none: there is "
            "nothing to compare with but full attention, trained here in the same way.",
            f"Text: {text}; lower-case WordPiece of {config.vocabulary}; 15 % of the tokens asked for, 80/10/10; "
            "whether the second half follows the first is asked too, as by BERT; 30 % of the batches are shorter.",
            f"{config.layers} layers of width {config.dim}, {config.heads} heads, fixed sines as positions; "
            f"{config.steps} updates of {config.tokens} tokens, AdamW at {config.lr:g}, linear decay, "
            f"{config.precision.replace('no', 'fp32')}.",
            f"Inputs of {config.short} and of {config.length} tokens are cut from the same text, and held-out "
            "stretches are the same share of it, but not the same ones: figures may differ a little for that alone.",
        ]

    def findings(self, rows: Sequence[Row], config: LongTextConfig) -> list[str]:
        lines = []
        others = [name for name, _ in config.methods if name != FULL]
        for name in others:
            found = apart([row for row in rows if "nll" in row], "nll", name, FULL, times=1)
            if found:
                distance, verdict = lead(found, 3, less_is_better=True)
                what = f"{config.short} tokens, full attention" if name == SHORT else name
                lines.append(
                    f"{what}, against full attention: {distance} nats a word" + (f" ({verdict})." if verdict else ".")
                )
        times = {
            name: statistics.fmean(found)
            for name, _ in config.methods
            if (found := _of([row for row in rows if row["method"] == name and "pace" in row], "seconds"))
        }
        if FULL in times and len(times) > 1:
            ratios = ", ".join(f"{name} {times[FULL] / each:.2f}" for name, each in times.items() if name in others[1:])
            lines.append(f"Updates a second, full attention's being 1: {ratios}.")
        return lines


def _of(rows: Sequence[Row], key: str) -> list[float]:
    return [float(row[key]) for row in rows if row.get(key) is not None]


def _pace(spec: str, length: int, config: LongTextConfig, device: torch.device) -> Row:
    """The time of an update's forward and backward pass. It does not depend on the weights or the words."""
    dice = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, config.vocabulary, (max(config.tokens // length, 1), length), generator=dice).to(device)
    asked = torch.arange(0, length, 7, device=device).expand(len(tokens), -1)

    def make() -> Callable[[], object]:
        model = MaskedLM(
            config.vocabulary, pinned(spec), dim=config.dim, heads=config.heads, layers=config.layers, length=length
        ).to(device)

        def loss() -> Tensor:
            with casting(device, config.precision):
                given = model(tokens, None, None, asked)
                total: Tensor = given.logits.float().square().mean() + given.auxiliary
            return total

        return forward_backward(list(model.parameters()), loss)

    return {"length": length, "batch": len(tokens), **measured(functools.partial(make), device, PACE_SECONDS)}


EXPERIMENTS: list[Any] = [ClusteredOutlook]
