"""The loop: any model, any task, any number of processes (Hugging Face Accelerate)."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clusterattn._errors import bad_value
from clusterattn._extras import need
from clusterattn._progress import Progress
from clusterattn.nn import ClusterMap, warn_if_collapsed, watched

from ..models import attentions
from ..tasks import Batch, Figures, Task, batches, order
from . import checkpoint
from .graphs import RecordedUpdate
from .radam import RAdam
from .settings import Settings

STATE, BEST = "state.safetensors", "best.safetensors"
WATCHED = 32  # examples that show how ClusterFormer groups
SAVE_EVERY = 20.0  # seconds at least between two checkpoints: what a crash may cost, against what writing costs


@dataclass
class Fitted:
    """What came of it. ``model`` has the weights of the best judgement."""

    model: nn.Module
    best: Figures
    steps: int
    seconds: float  # of training, without the judgements
    epochs: float
    history: list[dict[str, Any]] = field(default_factory=list)  # step, epoch, seconds, loss, lr, the dev figures

    @property
    def seconds_per_epoch(self) -> float:
        return self.seconds / max(self.epochs, 1e-9)


def fit(
    task: Task,
    model: nn.Module,
    settings: Settings | None = None,
    *,
    folder: Path | str | None = None,
    device: torch.device | str | None = None,
    tick: Progress | None = None,
) -> Fitted:
    """Train on the task's "train" split, judge on "dev", keep the best weights.

    folder   checkpoints; a training that was interrupted is taken up where it was last saved, to the same end
    device   "cpu", "cuda" or "cuda:1"; by default the fastest. Under `accelerate launch` every process has its own
    tick     called after every update with words, the number of updates in all and of those done
    """
    settings = settings or Settings()
    return _Training(task, model, settings, Path(folder) if folder else None, device, tick).run()


@torch.no_grad()
def judge(
    task: Task, model: nn.Module, split: str = "test", *, batch: int = 64, device: torch.device | str | None = None
) -> Figures:
    """The task's figures of a model on a split."""
    where = torch.device(device) if device is not None else next(model.parameters()).device
    model, training = model.to(where), model.training
    model.eval()
    try:
        return task.judge(model, (moved(each, where) for each in batches(task, split, batch)))
    finally:
        model.train(training)


def moved(batch: Batch, device: torch.device) -> Batch:
    return {name: each.to(device, non_blocking=True) for name, each in batch.items()}


class _Training:
    """The state of one training between two updates."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        settings: Settings,
        folder: Path | None,
        device: torch.device | str | None,
        tick: Progress | None,
    ) -> None:
        if not task.splits["train"]:
            raise bad_value("examples to train on", "none", "another file")
        self.task, self.settings, self.folder, self.tick = task, settings, folder, tick
        # ClusterFormer without its losses has parameters that no gradient reaches
        partly = self.grouped = any(isinstance(each, ClusterMap) for each in model.modules())
        self.accelerator = _accelerator(settings.precision, device, partly)
        self.processes: int = self.accelerator.num_processes
        self.plain = model.to(self.accelerator.device)
        if self.processes > 1 and any(each.memory is not None for each in attentions(model)):
            self._warm_up()
        alone_on_cuda = self.accelerator.device.type == "cuda" and self.processes == 1
        graphs = settings.graphs and alone_on_cuda and settings.precision != "fp16"  # fp16's scaler looks at gradients
        self.replayed = RecordedUpdate(self._descend) if graphs else None
        rate = torch.tensor(settings.lr, device=self.accelerator.device) if graphs else settings.lr
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer: torch.optim.Optimizer
        if settings.optimizer == "radam":
            optimizer = RAdam(trained, lr=rate, weight_decay=settings.weight_decay)
        else:
            optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=settings.weight_decay, capturable=graphs)
        self.model, self.optimizer = self.accelerator.prepare(self.plain, optimizer)
        self.attentions = attentions(self.plain)
        self.draws = [each.seed for each in self.attentions]  # for judgements, and for the model when it is handed out
        # where a graph finds the seeds of an update
        self.seeds = torch.zeros(len(self.attentions), dtype=torch.int64, device=self.accelerator.device)
        per_epoch = len(order(task, "train", settings.batch))
        self.per_epoch, self.steps = per_epoch, settings.steps or settings.epochs * per_epoch
        self.every = settings.evaluate or per_epoch
        self.step, self.seconds, self.shrunk, self.waited, self.since_shrunk = 0, 0.0, 1.0, 0, 0
        self.best: Figures = {}
        self.history: list[dict[str, Any]] = []
        self.kept: dict[str, Tensor] = {}  # the weights of the best judgement
        self.saved = time.monotonic()
        self.warned = False  # of a collapsed grouping

    def _warm_up(self) -> None:
        """Routing's centroids start from its first batch, and wrappers share only buffers that they find."""
        first = order(self.task, "train", self.settings.batch)[0]
        examples = [self.task.splits["train"][at] for at in first]
        with torch.no_grad():
            self.task.loss(self.plain.train(), moved(self.task.collate(examples), self.accelerator.device))

    # ------------------------------------------------------------------------------------------------ run

    def run(self) -> Fitted:
        self._resume()
        over = self._over()
        while not over:
            loss = self._updates(min(self.step - self.step % self.every + self.every, self.steps))
            figures = self._judged()
            self._note(loss, figures)
            over = self._over()
            if over or time.monotonic() - self.saved > SAVE_EVERY:
                self._save()
        self._end()
        return Fitted(self.plain, self.best, self.step, self.seconds, self.step / self.per_epoch, self.history)

    def _updates(self, until: int) -> float:
        """Train up to a step; the mean loss."""
        # Dropout and draws are a function of where training stands: one taken up again goes the same way.
        torch.manual_seed(_mixed(self.settings.seed, self.step, self.accelerator.process_index))
        self.model.train()
        started, first = time.perf_counter(), self.step
        total = torch.zeros((), device=self.accelerator.device)
        for batch in self._stream(until):
            total += self._update(batch)
            self.step += 1
            if self.tick is not None:
                self.tick(self._words(), self.steps, self.step)
        if self.processes > 1:
            total = self.accelerator.reduce(total, "mean")
        mean = float(total) / max(self.step - first, 1)  # also waits for the device
        self.seconds += time.perf_counter() - started
        if not math.isfinite(mean):
            raise bad_value(
                "a loss that is a number", f"{mean} before step {self.step}", "a smaller lr, a warm-up, or fp32"
            )
        return mean

    def _update(self, batch: Batch) -> Tensor:
        seeds = [_mixed(self.settings.seed, self.step, at) for at in range(len(self.attentions))]
        if self.replayed is not None:
            self.seeds.copy_(torch.tensor(seeds))
        for attention, seed in zip(self.attentions, seeds if self.replayed is None else self.seeds, strict=True):
            attention.seed = seed
        rate = self.shrunk * self.settings.rate(self.step, self.steps)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return self._descend(batch) if self.replayed is None else self.replayed(batch)

    def _descend(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        with self.accelerator.autocast():
            loss, number = self.task.loss(self.model, batch)
        count = number.float()
        if "weight" in batch:  # a share of nothing: see _share
            loss, count = loss * batch["weight"], count * batch["weight"]
        if self.processes > 1:
            # gradients are averaged over processes: with this factor their mean is that of the whole batch
            count = self.accelerator.reduce(count, "sum") / self.processes
        loss = loss / count
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.plain.parameters(), self.settings.clip)
        self.optimizer.step()
        return loss.detach()

    def _stream(self, until: int) -> Iterator[Batch]:
        """The batches of the steps from here on."""
        at = self.step
        while at < until:
            epoch, first = divmod(at, self.per_epoch)
            chosen = order(self.task, "train", self.settings.batch, seed=_mixed(self.settings.seed, epoch, -1))
            for rows in chosen[first : first + until - at]:
                yield moved(self._share(rows), self.accelerator.device)
                at += 1

    def _share(self, rows: list[int]) -> Batch:
        """This process's part of a batch. Where examples are fewer than processes, one is borrowed and weighs 0."""
        examples, rank = self.task.splits["train"], self.accelerator.process_index
        mine = rows[rank :: self.processes]
        batch = self.task.collate([examples[at] for at in mine or rows[:1]])
        return batch if mine else {**batch, "weight": torch.zeros(())}

    # ------------------------------------------------------------------------------------------------ judge

    def _judged(self) -> Figures:
        """By the first process; all must hear the same verdict to stop together."""
        verdict: list[Any] = [None]
        self._settle()
        if self.accelerator.is_main_process:
            verdict = [judge(self.task, self.plain, "dev", batch=self.settings.judge_batch)]
        if self.processes > 1:
            verdict = need("accelerate.utils", "train").broadcast_object_list(verdict)
        figures: Figures = verdict[0]
        return figures

    def _settle(self) -> None:
        """Back to the draws the model came with: one model, one answer."""
        for attention, seed in zip(self.attentions, self.draws, strict=True):
            attention.seed = seed

    def _note(self, loss: float, figures: Figures) -> None:
        better = not self.best or self._gain(figures) > self._gain(self.best)
        self.waited = 0 if better or self.step <= self.settings.warmup else self.waited + 1
        self.since_shrunk = 0 if better else self.since_shrunk + 1
        if better:
            self.best = figures
            self.kept = {name: each.detach().clone() for name, each in self.plain.state_dict().items()}
        if self.settings.decay == "plateau" and self.since_shrunk >= self.settings.plateau:
            self.shrunk, self.since_shrunk = self.shrunk / 2, 0
        self.history.append(
            {
                "step": self.step,
                "epoch": round(self.step / self.per_epoch, 3),
                "seconds": round(self.seconds, 3),
                "loss": loss,
                "lr": self.shrunk * self.settings.rate(self.step - 1, self.steps),
                **figures,
                **self._groupings(),
            }
        )

    @torch.no_grad()
    def _groupings(self) -> dict[str, Any]:
        """How ClusterFormer's layers tell tokens apart, on a few of the dev examples; a warning where they no longer
        do. Layers in the order of the model."""
        dev = self.task.splits["dev"]
        examples = [dev[at] for at in range(min(WATCHED, len(dev)))]
        if not self.grouped or not examples:
            return {}
        with watched(self.plain.eval()) as seen:
            self.task.loss(self.plain, moved(self.task.collate(examples), self.accelerator.device))
        if not self.warned:
            self.warned = warn_if_collapsed(seen)
        names = ("points", "centroids", "used", "largest", "steady", "trained")
        figures = {name: [getattr(each, name) for each in seen] for name in names}
        return {"groupings": {name: [each and round(each, 3) for each in row] for name, row in figures.items()}}

    def _gain(self, figures: Figures) -> float:
        value = figures[self.task.figure]
        return -math.inf if math.isnan(value) else value if self.task.better == "higher" else -value

    def _over(self) -> bool:
        target, patience = self.settings.target, self.settings.patience
        if self.step >= self.steps or (patience is not None and self.waited >= patience):
            return True
        if target is None or not self.best:
            return False
        return self._gain(self.best) >= (target if self.task.better == "higher" else -target)

    def _words(self) -> str:
        figure = f", {self.task.figure} {self.best[self.task.figure]:.4g}" if self.best else ""
        return f"epoch {-(-self.step // self.per_epoch)}{figure}"  # the one that the last update belongs to

    # ------------------------------------------------------------------------------------------------ keep

    def _save(self) -> None:
        if self.folder is not None and self.accelerator.is_main_process:
            progress = {name: getattr(self, name) for name in PROGRESS}
            if self.accelerator.scaler is not None:  # fp16's, which has felt its way to a scale
                progress["scaler"] = self.accelerator.scaler.state_dict()
            # the best first: a state must find the weights that it speaks of
            checkpoint.write(self.folder / BEST, self.kept, None, {}, self._recipe)
            checkpoint.write(self.folder / STATE, self.plain.state_dict(), self.optimizer, progress, self._recipe)
        self.saved = time.monotonic()

    def _resume(self) -> None:
        if self.folder is None or not (self.folder / STATE).exists():
            return
        progress = checkpoint.read(self.folder / STATE, self.plain, self.optimizer, self._recipe)
        for name in PROGRESS:
            setattr(self, name, progress[name])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(progress["scaler"])
        self.kept = checkpoint.weights(self.folder / BEST)
        if self.tick is not None:
            self.tick(f"going on from step {self.step}", self.steps, self.step)

    @functools.cached_property
    def _recipe(self) -> str:
        """What must be the same for a training to go on: model, data and settings. When to stop may change, unless the
        learning rate depends on it."""
        free = [name for name in WHEN_TO_STOP if self.settings.decay != "linear" or name not in ("steps", "epochs")]
        same = {name: value for name, value in asdict(self.settings).items() if name not in free}
        digest = hashlib.sha256(repr((same, self.task.name, repr(self.plain))).encode())
        for split, examples in sorted(self.task.splits.items()):
            digest.update(split.encode())
            for at in range(len(examples)):
                _feed(digest, examples[at])
        return digest.hexdigest()[:16]

    def _end(self) -> None:
        self.accelerator.wait_for_everyone()
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        if self.kept:
            self.plain.load_state_dict(self.kept)
        self._settle()
        self.plain.eval()


WHEN_TO_STOP = ("steps", "epochs", "patience", "target")
PROGRESS = ("step", "seconds", "shrunk", "waited", "since_shrunk", "best", "history")


def _accelerator(precision: str, device: torch.device | str | None, partly: bool) -> Any:
    accelerate = need("accelerate", "train")
    state = need("accelerate.state", "train")
    if state.PartialState._shared_state and state.PartialState().num_processes == 1:
        state.AcceleratorState._reset_state(True)  # one process may train several models, each with its own precision
    unused = need("accelerate.utils", "train").DistributedDataParallelKwargs(find_unused_parameters=partly)
    wanted = None if device is None else torch.device(device)
    if wanted is not None and wanted.type == "cuda" and not torch.cuda.is_available():
        raise bad_value(str(wanted), "no CUDA device that this torch can see", 'device="cpu"')
    if wanted is not None and wanted.index is not None and wanted.type == "cuda":
        torch.cuda.set_device(wanted)
    cpu = wanted is not None and wanted.type == "cpu"
    return accelerate.Accelerator(mixed_precision=precision, cpu=cpu, kwargs_handlers=[unused])


def _feed(digest: Any, value: Any) -> None:
    """An example, whatever it is made of, into a hash."""
    if isinstance(value, Tensor):
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        digest.update(repr((value.shape, value.dtype)).encode() + flat.numpy().tobytes())
    elif isinstance(value, (list, tuple)) and not all(isinstance(each, (int, float, str)) for each in value):
        for each in value:
            _feed(digest, each)
    elif is_dataclass(value):
        for each in fields(value):
            _feed(digest, getattr(value, each.name))
    else:
        digest.update(repr(value).encode())


def _mixed(*numbers: int) -> int:
    """A seed from several numbers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=6).digest(), "big")
