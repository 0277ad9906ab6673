"""The work behind clustered attention's speech experiments: a model trained with one attention, judged with others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clusterattn._rows import Row

from ..models import attending_with
from ..models.speech import SpeechEncoder
from ..tasks import Batch, batches
from ..tasks.speech import Recording, Speech, joined, mistakes
from ..train import Fitted, Settings, fit
from ..train.checkpoint import weights, write
from ..train.loop import moved
from ._experiment import Cell, Context, Experiment, pinned
from ._pace import casting, forward_backward, measured

SHARED = ("shared-full", "lsh-1", "lsh-4")  # queries are keys
TRAINED = ("full", "shared-full", "lsh-1", "lsh-4", "clustered-100", "improved-100", "refined-100")
EVALUATED = (
    "full", "shared-full", "lsh-1", "lsh-4", "clustered-100", "clustered-200", "improved-100", "improved-200",
    "refined-100", "refined-200", "oracle-top",
)  # fmt: skip

DEEP = ("full", "clustered-100", "improved-100", "refined-100")


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
class SpeechConfig:
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


SMALL = SpeechConfig(steps=3000)
# What Figure 1 sweeps at the small scale: layers and clusters, with one seed. Not in the configuration: the rows that
# are there carry its fingerprint.
SWEPT: dict[SpeechConfig, tuple[tuple[str, int], ...]] = {
    SMALL: (
        ("full", 2),
        ("full", 6),
        ("clustered-100", 6),
        ("improved-100", 2),
        ("improved-100", 6),
        ("refined-100", 6),
        ("clustered-50", 4),
        ("clustered-200", 4),
        ("clustered-300", 4),
        ("improved-50", 4),
        ("improved-200", 4),
        ("refined-50", 4),
        ("refined-200", 4),
    ),
}
PAPER = SpeechConfig(
    also=(
        ("full", 4),
        ("full", 6),
        ("improved-100", 6),
        ("improved-200", 6),
        ("improved-200", 9),
        ("clustered-200", 9),
        ("clustered-300", 9),
    ),
    data="wsj",
    seeds=(0,),
    joinings=1,
    judged=1,
    layers=9,
    steps=None,
    epochs=200,
    evaluate=None,
    batch=10,
    lr=1e-4,
    decay="plateau",
    precision="no",
    patience=20,
    seconds=300_000.0,
)
SMOKE = SpeechConfig(
    data=None,
    also=(("full", 2), ("improved-100", 2), ("improved-200", 2)),
    seeds=(0,),
    frames=40,
    joinings=1,
    judged=1,
    layers=1,
    dim=24,
    heads=2,
    feedforward=32,
    top=4,
    steps=2,
    evaluate=1,
    batch=4,
    precision="no",
    seconds=1.0,
)


@dataclass(frozen=True)
class FromFewer:
    """Models with more than ``clusters`` clusters are fine-tuned from the one that has so many (the paper's C.3.1)."""

    epochs: int
    lr: float
    clusters: int = 100

    def start(self, name: str) -> str | None:
        """improved-100 for improved-200; None for what is trained from scratch."""
        kind, _, number = name.partition("-")
        more = kind in ("clustered", "improved", "refined") and int(number) > self.clusters
        return f"{kind}-{self.clusters}" if more else None


# Which scales do so. Not in the configuration, as above: at `small` all are trained from scratch.
FINE_TUNED: dict[SpeechConfig, FromFewer] = {PAPER: FromFewer(15, 1e-5), SMOKE: FromFewer(1, 1e-4)}


def task_of(config: SpeechConfig, context: Context, seed: int) -> Speech:
    if config.data is None:
        return invented(config.frames, config.joinings, seed)
    if config.data == "an4":
        return Speech.an4(
            context.folder("an4"), frames=config.frames, joinings=config.joinings, judged=config.judged, seed=seed
        )
    return Speech.read(context.folder(config.data))  # a user's own .wav and .txt


def invented_recordings() -> list[Recording]:
    """Three phones, each a direction in feature space held for six frames, then two of silence."""
    dice = torch.Generator().manual_seed(0)
    phones = [torch.randint(3, (2,), generator=dice) for _ in range(24)]
    held = torch.tensor([1.0] * 6 + [0.0] * 2).repeat(2).unsqueeze(1)
    heard = [torch.eye(5)[each].repeat_interleave(8, 0) * held for each in phones]
    return [
        Recording(sound + 0.1 * torch.randn(16, 5, generator=dice), each)
        for sound, each in zip(heard, phones, strict=True)
    ]


INVENTED_PHONES = ["AA", "IY", "UW"]


def invented(frames: int, joinings: int, seed: int = 0) -> Speech:
    """Speech made up in code."""
    spoken = invented_recordings()
    splits: dict[str, Sequence[Recording]] = {
        "train": joined(spoken[:16], frames, joinings, seed),
        "dev": joined(spoken[16:20], frames, 1, 0),
        "test": joined(spoken[20:], frames, 1, 0),
    }
    return Speech(splits, INVENTED_PHONES, features=5, length=frames)


class Trained(Experiment):
    """What the tables share. A cell is one trained model and all its evaluations, one row for each of these; or the
    pace of such a model, measured with nothing beside it: models may train several at a time."""

    needs = ("an4",)

    def check(self, config: SpeechConfig, context: Context) -> None:
        if config.data is not None:
            context.folder(config.data)

    def cells(self, config: SpeechConfig) -> list[Cell]:
        wanted = [(name, config.layers, seed) for seed in config.seeds for name in config.trained]
        wanted += [(name, layers, config.seeds[0]) for name, layers in config.also + SWEPT.get(config, ())]
        slow = {"full": 1.0, "shared-full": 1.0, "lsh-1": 1.2}
        paces = dict.fromkeys((name, layers) for name, layers, _ in wanted)
        return [
            *(
                Cell(
                    f"{name}, {layers} layers, seed {seed}",
                    {"trained": name, "layers": layers, "seed": seed},
                    config.seconds * slow.get(name, 1.5) * layers / config.layers,
                )
                for name, layers, seed in wanted
            ),
            *(
                Cell(f"pace of {name}, {layers} layers", {"trained": name, "layers": layers, "pace": True}, alone=True)
                for name, layers in paces
            ),
        ]

    def task(self, cell: Cell, config: SpeechConfig, context: Context) -> Speech:
        return task_of(config, context, cell.settings["seed"])

    def run(self, cell: Cell, config: SpeechConfig, context: Context) -> list[Row]:
        return self._pace(cell, config, context) if "pace" in cell.settings else self._train(cell, config, context)

    def _pace(self, cell: Cell, config: SpeechConfig, context: Context) -> list[Row]:
        """The time of an update's forward and backward pass over a batch of the mean length, and of an answer: neither
        depends on the weights."""
        device = context.device
        frames = torch.randn(config.batch, config.frames, FEATURES, device=device)
        mask = torch.ones(config.batch, config.frames, dtype=torch.bool, device=device)

        def make(training: bool) -> Callable[[], object]:
            model = self._model(SpeechEncoder, cell, config, FEATURES, SYMBOLS).to(device).train(training)

            def answer() -> Tensor:
                with casting(device, config.precision):
                    given = model(frames, mask)
                    total: Tensor = given.logits.float().square().mean() + given.auxiliary
                return total

            return forward_backward(list(model.parameters()), answer) if training else torch.no_grad()(answer)

        return [
            {
                "pass": which,
                "batch": config.batch,
                "frames": config.frames,
                **measured(functools.partial(make, which == TRAINING), device, PACE_SECONDS),
            }
            for which in (TRAINING, ANSWERING)
        ]

    def _model(self, make: Callable[..., nn.Module], cell: Cell, config: SpeechConfig, *given: Any) -> nn.Module:
        name, layers = cell.settings["trained"], cell.settings["layers"]
        return make(
            pinned(spec(name, config.top)),
            *given,
            dim=config.dim,
            heads=config.heads,
            layers=layers,
            feedforward=config.feedforward,
            dropout=config.dropout,
            reach=config.reach,
            hidden=config.hidden,
            shared_qk=name in SHARED,
        )

    def _train(self, cell: Cell, config: SpeechConfig, context: Context) -> list[Row]:
        name, layers, seed = (cell.settings[key] for key in ("trained", "layers", "seed"))
        task = self.task(cell, config, context)
        fitted, start = self._fitted(task, cell, config, context, context.work.parent)
        main = layers == config.layers and name in config.trained
        others = [each for each in config.evaluated if fits(each, name)] if main else []
        whole = "shared-full" if name in SHARED else "full"
        rows = evaluated(task, fitted.model, whole, [name, *others], config.top, context.device)
        lines = thinned(fitted.history)
        rows[0] |= {
            "steps": fitted.steps,
            "seconds": fitted.seconds,  # not rounded: with the next one it says how many updates make an epoch
            "seconds_per_epoch": fitted.seconds_per_epoch,
            "history": [[round(line[key], 4) for key in (*HISTORY, task.figure)] for line in lines],
            **({"tuned_from": start} if start else {}),
        }
        return rows

    def _fitted(
        self, task: Speech, cell: Cell, config: SpeechConfig, context: Context, home: Path
    ) -> tuple[Fitted, str | None]:
        """The trained model, and the name of the one it started from where it is fine-tuned. That one's weights lie in
        ``home`` if its own cell has run; else it is trained first."""
        seed, rule = cell.settings["seed"], FINE_TUNED.get(config)
        start = rule.start(cell.settings["trained"]) if rule else None
        torch.manual_seed(seed)
        model = self._model(task.model, cell, config)
        settings = Settings(
            steps=config.steps,
            epochs=config.epochs,
            batch=config.batch,
            lr=config.lr,
            warmup=config.warmup,
            decay=config.decay,
            precision=config.precision,
            patience=config.patience,
            evaluate=config.evaluate,
            judge_batch=JUDGED_AT_ONCE,
            seed=seed,
        )
        folder = context.work
        if rule and start:
            first = replace(cell, settings={**cell.settings, "trained": start})
            kept = _weights_of(first, home)
            if not kept.exists():
                self._fitted(task, first, config, replace(context, work=context.work / "start"), home)
            model.load_state_dict(weights(kept))
            settings = replace(settings, steps=None, epochs=rule.epochs, lr=rule.lr, patience=None, evaluate=None)
            folder = context.work / "tuned"
        fitted = fit(task, model, settings, folder=folder, device=context.device, tick=context.tick)
        if rule and not start:
            write(_weights_of(cell, home), fitted.model.state_dict(), None, {}, cell.name)
        return fitted, start


def _weights_of(cell: Cell, home: Path) -> Path:
    return home / f"{cell.settings['trained']}-{cell.settings['layers']}-{cell.settings['seed']}.safetensors"


JUDGED_AT_ONCE = 16
FEATURES, SYMBOLS = 39, 33  # AN4's
TRAINING, ANSWERING = "training", "answering"  # passes whose pace is measured
PACE_SECONDS = 0.2  # for each of them
SHOWN = 60  # points of a learning curve that are kept
HISTORY = ("step", "seconds", "loss", "nll")  # and the error rate


def thinned(history: Sequence[Row]) -> Sequence[Row]:
    """Evenly, at most SHOWN, the last among them."""
    every = max(-(-len(history) // SHOWN), 1)
    return history[(len(history) - 1) % every :: every]


@torch.no_grad()
def evaluated(
    task: Speech, model: nn.Module, whole: str, names: Sequence[str], top: int, device: torch.device
) -> list[Row]:
    """A row for every attention that the model is evaluated with, the first being its own.

    dev, test   symbol error rates
    kl          how far the answer of each frame of dev lies from that of full attention with the same weights, in nats
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
            row[split] = wrong / sum(int(batch["symbol_mask"].sum()) for batch in sets[split])
        rows.append(row)
    return rows


def _with(model: nn.Module, name: str, top: int, given: Sequence[Batch]) -> list[Tensor]:
    with attending_with(model, pinned(spec(name, top))):
        return [model(batch["frames"], batch["mask"]).logits.float() for batch in given]


def _kl(truth: Sequence[Tensor], ours: Sequence[Tensor], given: Sequence[Batch]) -> float:
    total = frames = 0.0
    for one, other, batch in zip(truth, ours, given, strict=True):
        wanted, got = one.log_softmax(-1), other.log_softmax(-1)
        total += float(((wanted.exp() * (wanted - got)).sum(-1) * batch["mask"]).sum())
        frames += float(batch["mask"].sum())
    return total / frames
