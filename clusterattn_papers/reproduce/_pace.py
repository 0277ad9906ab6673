"""Time and memory of one step, measured with nothing beside it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clusterattn._rows import Row
from clusterattn.measure.speed import first_line, peak_memory, timed

Step = Callable[[], object]


def measured(make: Callable[[], Step], device: torch.device, seconds: float) -> Row:
    """Seconds of a step, on CUDA replayed as a graph, and the most memory it and what it needs ever hold; or why there
    is no number."""
    _clean(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    try:
        step = make()
        held = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else 0
        step()  # whatever has to be compiled
        memory = held + peak_memory(step, device)
        taken = timed(step, device, seconds=seconds)
        row: Row = {
            "seconds": taken.seconds,
            "eager_seconds": taken.eager,
            "memory_bytes": memory,
            "timed": taken.repetitions,
        }
        return row if taken.why_eager is None else {**row, "why_eager": taken.why_eager[:100]}
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        return {"failed": first_line(error)[:100]}
    finally:
        step = taken = None  # type: ignore[assignment]
        _clean(device)


def _clean(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def casting(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def forward_backward(leaves: Sequence[Tensor], loss: Callable[[], Tensor]) -> Step:
    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        for leaf in leaves:  # here and not before: the next step's peak is to count its own gradients
            leaf.grad = None

    return step
