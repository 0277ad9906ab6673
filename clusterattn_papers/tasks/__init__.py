"""Data, losses and figures of what the papers train."""

from __future__ import annotations

import importlib

from clusterattn._errors import bad_value

from ._task import Batch, Figures, Task, batches, classified, order, padded, several

# the tasks that `clusterattn train` knows: name -> module and class, imported when asked for
TASKS = {
    "classify": ("text", "Classify"),
    "pairs": ("pairs", "Pairs"),
    "ranking": ("pairs", "Ranking"),
    "translate": ("translation", "Translate"),
    "speech": ("speech", "Speech"),
    "masked": ("masked", "Masked"),
}


def task_named(name: str) -> type[Task]:
    if name not in TASKS:
        raise bad_value(f"a task: {', '.join(TASKS)}", repr(name), "classify")
    module, kind = TASKS[name]
    found: type[Task] = getattr(importlib.import_module(f".{module}", __name__), kind)
    return found


__all__ = ["TASKS", "Batch", "Figures", "Task", "batches", "classified", "order", "padded", "several", "task_named"]
