"""Advice about a model: the plan that ``tune`` finds, timed in the whole model at growing lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_value
from .._extras import need
from .._plan import Plan
from .._progress import Tick
from .._rows import Row, environment
from ..measure.bench import PASSES, PEER
from ..measure.speed import peak_memory
from ..measure.words import counted, human_bytes, human_error
from .advice import Advice, Phases, Times, lengths_up_to, pays_from
from .bench import Bench, Memory, hidden_output
from .search import tune

SHORTEST = 16  # tokens


def advise_model(
    model: torch.nn.Module, batches: Iterable[Mapping[str, Tensor]] | None, tolerance: float, repetitions: int,
    state: str | Path | None, name: str | None, phases: Phases,
) -> Advice:  # fmt: skip
    """As ``advise``; without storing crossings."""
    shown = [dict(each) for each in batches or ()]
    if not shown:
        raise bad_value("batches for the model", "none", "advise(model, [tokenizer(text, return_tensors='pt')])")
    plan = tune(model, shown, tolerance, state=state, name=name, tick=phases)
    label = plan.note["model"] or type(model).__name__
    length = plan.length or _length(shown[0])
    about = f"{label}, {counted(plan.note['sequences'], 'sequence')} of up to {length} tokens"
    if not plan.layers:
        answer = _why_exact(plan, tolerance)
        return Advice(about, length, False, answer, None, plan, tolerance, None, ())
    taken, held = _times(model, shown[0], plan, length, repetitions, phases.next())
    exact, ours = (Times(taken[which], float) for which in ("exact", "tuned"))
    at = pays_from(exact, ours, length)
    shared = _shared(model, shown[0])
    rows: tuple[Row, ...] = tuple(
        {
            "theme": "advise", "method": label, "n": n, "measured": True, "seconds": seconds,
            "seconds_per_token": seconds / (n * shared["b"]), "memory_bytes": held[which] if n == length else None,
            **shared,
        }
        for n in sorted(taken["exact"])
        for which, label, seconds in (("exact", PEER, taken["exact"][n]), ("tuned", "plan", taken["tuned"][n]))
    )  # fmt: skip
    faster = exact.at(length) / ours.at(length)
    speed = f"{faster:.3g} times as fast as with exact attention"
    error = f"its output is off by {human_error(plan.note['error'])}, tolerance {tolerance:g}"
    if at is None:
        answer = f"Use exact attention: with the cheapest plan inside the tolerance the model is {speed} ({error})."
        plan = replace(plan, layers={}, note={**plan.note, "exact_wins": True})
    else:
        many = f"{len(plan.layers)} of {len(plan.note['layers'])} layers"
        answer = (
            f"Swap the plan in ({many}) from {at} tokens on: at {length} the model is {speed} ({error}); it holds "
            f"{human_bytes(held['tuned'])} beside its weights, with exact attention {human_bytes(held['exact'])}."
        )
        plan = replace(plan, exact_below=at)
    return Advice(about, length, at is not None, answer, at, plan, tolerance, plan.note["error"], rows)


def _why_exact(plan: Plan, tolerance: float) -> str:
    exact, tuned = (plan.note["seconds"][name] for name in ("exact", "tuned"))
    if tuned >= exact and any(row["method"] != "exact" for row in plan.note["layers"]):
        return f"Use exact attention: no plan inside {tolerance:g} is faster."
    return f"Use exact attention: no cheaper method keeps the model's output within {tolerance:g}, or none is faster."


def _times(
    model: torch.nn.Module, batch: Mapping[str, Tensor], plan: Plan, length: int, repetitions: int, tick: Tick
) -> tuple[dict[str, dict[int, float]], dict[str, int]]:
    """Seconds of the whole model, exact and with the plan, at each length; peak bytes at the longest."""
    hf, was_training = need("clusterattn.hf", "hf"), model.training
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    taken: dict[str, dict[int, float]] = {"exact": {}, "tuned": {}}
    held: dict[str, int] = {}
    lengths = [n for n in lengths_up_to(length, SHORTEST) if n == length or _cut(batch, length, n) is not None]
    model.eval()
    try:
        with torch.no_grad():
            for n in lengths:
                tick(f"time at {n} tokens", len(lengths))
                given = _cut(batch, length, n) or dict(batch)
                bench = Bench(model, [given], hidden_output, Memory(None, ""), list(plan.layers), "time")
                for which, seconds in bench.seconds(plan.layers, repetitions).items():
                    taken[which][n] = seconds
            for which in taken:
                if which == "tuned":
                    hf.swap(model, replace(plan, exact_below=0))
                held[which] = peak_memory(partial(hidden_output, model, dict(batch)), device)
    finally:
        hf.restore(model)
        model.train(was_training)
    return taken, held


def _length(batch: Mapping[str, Tensor]) -> int:
    return max(value.shape[1] for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1)


def _cut(batch: Mapping[str, Tensor], length: int, n: int) -> dict[str, Any] | None:
    """The first n tokens of a batch of token ids; None where the batch is of another kind (sounds, images)."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != length:
        return None
    along = {key for key, x in batch.items() if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == length}
    return {key: value[:, :n] if key in along else value for key, value in batch.items()}


def _shared(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Row:
    first = next(iter(model.parameters()))
    many = len(next(value for value in batch.values() if isinstance(value, Tensor)))
    return {
        "b": many, "dtype": str(first.dtype).removeprefix("torch."), "device": first.device.type, "causal": False,
        "pass": PASSES[0], "environment": environment(first.device),
    }  # fmt: skip
