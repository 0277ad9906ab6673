"""Every method on the same q, k, v: how close to exact attention, how fast, how much memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._attention import attention, attention_matrix, groups
from .._progress import Tick
from .._rows import Row, environment
from .._types import Clusters, Groups, Method
from ..methods import METHODS
from . import cost
from .error import exact_answer, exact_matrix, head_errors, relative_error, row_l1
from .sample import Sample
from .speed import interleaved, peak_memory

# The dense weights are for looking, never for speed: past this many entries they are left out.
DENSE_LIMIT = 2**25

# Half and twice the budget, so that the picture shows a curve for each method instead of a dot.
SWEEP = (0.5, 2.0)
SWEPT = ("clusters", "top", "parts", "rounds", "window")
LONG, CURVES_WHEN_LONG = 4096, ("clustered", "improved", "refined", "smyrf")  # past so many queries all take minutes


@dataclass(frozen=True)
class Comparison:
    """The rows, and what pictures need."""

    sample: Sample
    rows: list[Row]  # the methods asked for, exact first
    swept: list[Row]  # the same methods at half and twice the budget
    skipped: dict[str, str]  # label -> why it can not answer here
    errors: dict[str, Tensor]  # label -> (b h) relative error of each head
    methods: dict[str, Method]  # label -> instance
    causal: bool
    seed: int
    notes: list[str] = field(default_factory=list)

    def weights(self, label: str, b: int) -> Tensor:
        """The dense (h n m) weights that a method applies in one batch element."""
        part = self.sample.batch_element(b)
        return attention_matrix(part.q, part.k, part.v, method=self.methods[label], **self._call(part))[0]

    def groups(self, label: str, b: int) -> Groups:
        part = self.sample.batch_element(b)
        return groups(part.q, part.k, part.v, method=self.methods[label], **self._call(part))

    def clustered(self) -> list[str]:
        """Labels of the methods that make clusters of queries."""
        return [label for label, method in self.methods.items() if method.groups_type is Clusters]

    def typical_head(self, b: int) -> int:
        """The head whose error is the median one: neither the best nor the worst is picked for show."""
        judged = next((label for label in reversed(self.errors) if label.startswith("refined")), [*self.errors][-1])
        at = self.errors[judged][b].argsort()
        return int(at[(len(at) - 1) // 2])

    def _call(self, part: Sample) -> dict[str, Any]:
        return masks(part, self.causal, self.seed)


def masks(sample: Sample, causal: bool, seed: int) -> dict[str, Any]:
    return {"key_mask": sample.key_mask, "query_mask": sample.query_mask, "causal": causal, "seed": seed}


def methods_for(
    n: int,
    m: int | None = None,
    *,
    clusters: int | None = None,
    top: int | None = None,
    rounds: int | None = None,
    seats: int | None = None,
    window: int | None = None,
) -> list[Method]:
    """Every method at one budget. What is not given follows the length: 25 clusters, 32 keys at 512. Refined chooses
    its sizes itself."""
    asked = {"clusters": clusters, "top": top}
    clusters = min(100, max(4, n // 20)) if clusters is None else clusters
    top = min(32, max(4, (n if m is None else m) // 16)) if top is None else top
    seats = min(64, max(8, n // 16)) if seats is None else seats
    budget: dict[str, dict[str, int | None]] = {
        "clustered": {"clusters": clusters},
        "improved": {"clusters": clusters, "top": top},
        "refined": asked,
        "smyrf": {"rounds": rounds, "q_seats": seats, "k_seats": seats},
        "reformer": {"rounds": rounds},
        "routing": {"window": window},
        "oracle_top": {"top": top},
        "local": {"window": window},
    }
    chosen = []
    for name, kind in METHODS.items():
        given = {key: value for key, value in budget.get(name, {}).items() if value is not None}
        chosen.append(kind.from_dict(given))
    return chosen


def scaled(method: Method, factor: float) -> Method | None:
    """The same method at another budget; None when nothing in it can be scaled."""
    now = {name: getattr(method, name, None) for name in SWEPT}
    if now["parts"] == 1:  # one part is none: not every method can have two
        del now["parts"]
    then = {name: max(1, round(value * factor)) for name, value in now.items() if value is not None}
    changed = {name: value for name, value in then.items() if value != now[name]}
    return dataclasses.replace(method, **changed) if changed else None


def refusal(method: Method, sample: Sample, causal: bool) -> str | None:
    """Why a method can not answer for this input, in one sentence; None when it can."""
    _, _, n, m, _, _ = sample.shape
    if causal and method.causality == "no":
        return "it has no causal form"
    if method.self_only and n != m:
        return f"it is self-attention only, and here are {n} queries and {m} keys"
    return None


def compare(
    sample: Sample,
    methods: Sequence[Method],
    *,
    causal: bool = False,
    seed: int = 0,
    repetitions: int = 5,
    sweep: bool = True,
    seconds: float = 60.0,
    tick: Tick | None = None,
) -> Comparison:
    """Measure. Who can not answer here is listed with the reason, the others become rows, exact first."""
    device, call = sample.q.device, masks(sample, causal, seed)
    points, skipped = _points(sample, methods, causal, sweep)
    asked = [label for label, (_, factor) in points.items() if factor == 1]
    steps = len(points) + len(asked) + len(points) * repetitions

    def tell(label: str) -> None:
        if tick is not None:
            tick(label, steps)

    truth = exact_answer(sample.q, sample.k, sample.v, key_mask=sample.key_mask, causal=causal)
    laid_out, notes = _laid_out(sample)
    runs = {label: partial(_answer, sample, method, call) for label, (method, _) in points.items()}
    errors: dict[str, Tensor] = {}
    rows: dict[str, Row] = {}
    for label, (method, factor) in points.items():
        tell(label)
        out = runs[label]()
        errors[label] = head_errors(out, truth, sample.query_mask)
        row_errors = [_row_l1(sample.batch_element(at), method, causal, seed) for at in laid_out if factor == 1]
        rows[label] = {
            "theme": "compare",
            "method": label,
            **_settings(sample, method, causal),
            "budget": factor,
            "error": relative_error(out, truth, sample.query_mask),
            "row_l1": _mean(row_errors),
        }
    for label in asked:
        tell(label)
        rows[label]["memory_bytes"] = peak_memory(runs[label], device)
    waiting = iter([*runs] * repetitions)
    taken = interleaved(  # every run has been warmed up above
        runs,
        repetitions=repetitions,
        warmup=0,
        device=device,
        seconds=seconds,
        progress=lambda: tell(next(waiting)),
    )
    around = environment(device)
    for label, row in rows.items():
        row["seconds"] = min(taken[label])
        row["repetitions"] = len(taken[label])
        row["speedup"] = min(taken["exact"]) / row["seconds"]
        row.setdefault("memory_bytes", None)
        row["memory_share"] = row["memory_bytes"] / max(rows["exact"]["memory_bytes"], 1) if label in asked else None
        row.update(_where(sample), causal=causal, seed=seed, source=sample.source, environment=around)
    return Comparison(
        sample=sample,
        rows=[rows[label] for label in asked],
        swept=[row for label, row in rows.items() if label not in asked],
        skipped=skipped,
        errors={label: errors[label] for label in asked},
        methods={label: points[label][0] for label in asked},
        causal=causal,
        seed=seed,
        notes=notes,
    )


def _answer(sample: Sample, method: Method, call: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        out = attention(sample.q, sample.k, sample.v, method=method, **call)
    assert isinstance(out, Tensor)
    return out


def _settings(sample: Sample, method: Method, causal: bool) -> Row:
    """What a method is here, and what it costs."""
    _, h, n, m, d, e = sample.shape
    at = cost.Shape(n, m, d, e, causal, h // sample.k.shape[1])
    filled = method.at(n, m, d, e, causal=causal)
    return {"name": method.name, "settings": filled.to_dict(), "cost_share": cost.share(method, at)}


def _where(sample: Sample) -> Row:
    dtype = str(sample.q.dtype).removeprefix("torch.")
    return {**dict(zip("bhnmde", sample.shape, strict=True)), "dtype": dtype, "device": sample.q.device.type}


def _points(
    sample: Sample, methods: Sequence[Method], causal: bool, sweep: bool
) -> tuple[dict[str, tuple[Method, float]], dict[str, str]]:
    """What is measured, label -> method and share of the budget asked for, exact first; and who can not answer."""
    exact, (n, m, d, e) = METHODS["exact"](), sample.shape[2:]
    points: dict[str, tuple[Method, float]] = {"exact": (exact, 1.0)}
    skipped: dict[str, str] = {}
    for method in methods:
        why_not = refusal(method, sample, causal)
        if why_not is not None:
            skipped[str(method)] = why_not
        elif method != exact:
            points[str(method)] = (method, 1.0)
    for method, _ in list(points.values()):
        curve = sweep and (n <= LONG or method.name in CURVES_WHEN_LONG)
        for factor in SWEEP if curve else ():
            other = scaled(method.at(n, m, d, e, causal=causal), factor)
            if other is not None and str(other) not in points:
                points[str(other)] = (other, factor)
    return points, skipped


def _laid_out(sample: Sample) -> tuple[list[int], list[str]]:
    """The batch elements whose weights are few enough to lay out densely, and a note on those that are not."""
    b, h, n, m, _, _ = sample.shape
    if h * n * m > DENSE_LIMIT:
        weights = f"{h} × {n} × {m} weights are too many to lay out densely"
        return [], [f"row L1 errors and maps are left out: {weights}"]
    found = list(range(min(b, max(1, DENSE_LIMIT // (h * n * m)))))
    notes = [f"row L1 errors are those of the first {len(found)} of {b} batch elements"] if len(found) < b else []
    if sample.query_mask is not None:  # one that is all padding has no rows to judge by
        found = [at for at in found if sample.query_mask[at].any()]
    return found, notes


def _row_l1(part: Sample, method: Method, causal: bool, seed: int) -> float:
    weights = attention_matrix(part.q, part.k, part.v, method=method, **masks(part, causal, seed))
    exact = exact_matrix(
        part.q,
        part.k,
        key_mask=part.key_mask,
        causal=causal,
        dtype=torch.promote_types(part.q.dtype, torch.float32),
    )
    return row_l1(weights, exact, part.query_mask)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
