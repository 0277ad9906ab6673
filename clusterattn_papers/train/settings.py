"""How to train: everything but the model and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clusterattn._errors import bad_value, check_choice, check_whole


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the loop is told. The defaults are the clustered attention paper's for its synthetic task.

    steps          updates in all; by default as many as ``epochs`` need
    optimizer      "radam" as in that paper, or "adamw"
    warmup         updates over which the learning rate rises from 0
    decay          after that: "constant", "linear" down to 0, "root" (1/√step), or "plateau": halved whenever
                   ``plateau`` judgements in a row bring nothing better
    clip           the largest gradient norm
    precision      "no" (fp32), "bf16", "fp16"
    patience       stop after so many judgements without gain; None: never
    target         stop once the deciding figure is this good; None: never
    evaluate       updates between judgements on the dev split; by default an epoch
    graphs         on one CUDA device, record updates as CUDA graphs, one for each shape of batch, and replay them:
                   small models train several times faster. The methods' draws are still new in every update
    seed           of the order of examples, of dropout and of the methods' draws, which are new in every update
    """

    steps: int | None = None
    epochs: int = 10
    batch: int = 32
    judge_batch: int = 64
    optimizer: str = "radam"
    lr: float = 2e-4
    warmup: int = 0
    decay: str = "constant"
    plateau: int = 2
    weight_decay: float = 0.01
    clip: float = 10.0
    precision: str = "no"
    patience: int | None = None
    target: float | None = None
    evaluate: int | None = None
    graphs: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "judge_batch", "plateau", "steps", "patience", "evaluate"):
            if getattr(self, name) is not None:
                check_whole("Settings", **{name: getattr(self, name)})
        check_choice("Settings", "optimizer", self.optimizer, ("radam", "adamw"))
        check_choice("Settings", "decay", self.decay, ("constant", "linear", "root", "plateau"))
        check_choice("Settings", "precision", self.precision, ("no", "bf16", "fp16"))
        if not (self.lr > 0 and self.clip > 0):
            raise bad_value("lr and clip above 0", f"lr={self.lr}, clip={self.clip}", "lr=2e-4, clip=10.0")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of an update, before any plateau."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.decay == "linear":
            return self.lr * (steps - step) / max(steps - self.warmup, 1)
        if self.decay == "root":
            return self.lr * math.sqrt(max(self.warmup, 1) / (step + 1))
        return self.lr
