"""A trained model as a folder: weights, what it is, what its task needs, how it was judged, how it learnt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from clusterattn._errors import bad_value
from clusterattn._extras import need
from clusterattn._files import write_whole
from clusterattn._rows import dumps
from clusterattn.measure import plots
from clusterattn.methods import MethodSpec
from clusterattn.methods import method as as_method

from ..tasks import Figures, Task, task_named
from .checkpoint import packed
from .loop import Fitted

VERSION = 1
CONFIG, WEIGHTS, METRICS, HISTORY, CURVE = (
    "config.json",
    "model.safetensors",
    "metrics.json",
    "history.jsonl",
    "curve.png",
)


def save(
    folder: Path | str,
    task: Task,
    fitted: Fitted,
    method: MethodSpec,
    sizes: dict[str, Any],
    figures: dict[str, Figures],
) -> list[Path]:
    """Write the folder; its config comes last, so that a folder with one is whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    task.save(folder)
    about = {"version": VERSION, "task": task.name, "method": as_method(method).to_dict(), "sizes": sizes}
    return [
        write_whole(folder / WEIGHTS, packed(fitted.model.state_dict())),
        write_whole(folder / METRICS, json.dumps({"dev": fitted.best, **figures}, indent=2) + "\n"),
        write_whole(folder / HISTORY, "".join(dumps(row) + "\n" for row in fitted.history)),
        write_whole(folder / CURVE, curve(fitted.history, task.figure)),
        write_whole(folder / CONFIG, json.dumps(about, indent=2) + "\n"),
    ]


def load(folder: Path | str) -> tuple[Task, nn.Module]:
    """The task, to speak to the model with, and the model: ``task.predict(model, ["some text"])``."""
    folder = Path(folder)
    if not (folder / CONFIG).exists():
        raise bad_value("a folder that `clusterattn train` wrote", f"{folder}, without {CONFIG}", "its --out")
    about = json.loads((folder / CONFIG).read_text())
    if about.get("version") != VERSION or "task" not in about:
        raise bad_value(f"a model of version {VERSION}", f"{folder / CONFIG}", "training it again")
    task = task_named(about["task"]).restore(folder)
    model = task.model(about["method"], **about["sizes"])
    model.load_state_dict(need("safetensors.torch", "train").load_file(folder / WEIGHTS))
    return task, model.eval()


def curve(history: Sequence[dict[str, Any]], figure: str) -> bytes:
    """The learning curve: the loss on training data, the deciding figure on dev."""
    with plots.rules():
        drawn = plots.canvas(9, 3.6)
        panels = drawn.subplots(1, 2)
        for panel, key, title in zip(panels, ("loss", figure), ("training loss", f"{figure} on dev"), strict=True):
            panel.plot([row["step"] for row in history], [row[key] for row in history], color="#0072B2", marker="o")
            panel.set(xlabel="updates", title=title)
        return plots.as_png(drawn)
