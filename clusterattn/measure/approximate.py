"""A pretrained model with other attention in it: what becomes of its answers, at what cost (the paper's Table 4)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor

from .._attention import attention_matrix
from .._errors import bad_value
from .._extras import need
from .._plan import EVERY, LayerPlan, Plan
from .._progress import Tick
from .._rows import Row, environment
from .._types import Method
from ..methods import Exact
from . import cost
from .compare import DENSE_LIMIT
from .error import exact_matrix
from .speed import once
from .tasks import Loaded, ModelAnswer, ModelBatch, ModelTask, Sums

if TYPE_CHECKING:
    from ..hf import LayerCall

Given = Union[Method, Plan]
SHOWN_LAYERS = 3  # attention maps: of the first, the middle and the last layer


@dataclass(frozen=True)
class Head:
    """q, k and v of one head of one sequence without its padding, kept for its map."""

    q: Tensor  # (1 1 n d)
    k: Tensor  # (1 1 m d)
    v: Tensor  # (1 1 m e)
    scale: float | None
    causal: bool
    at: int
    methods: dict[str, Method]

    @property
    def drawable(self) -> bool:
        return self.q.shape[2] * self.k.shape[2] <= DENSE_LIMIT

    def weights(self) -> dict[str, Tensor]:
        """The dense (n m) weights of exact attention and of each method."""
        options: dict[str, Any] = {"causal": self.causal, "scale": self.scale}
        found = {"exact": exact_matrix(self.q, self.k, dtype=torch.float32, **options)[0, 0]}
        for label, method in self.methods.items():
            found[label] = attention_matrix(self.q, self.k, self.v, method=method, **options)[0, 0]
        return found


@dataclass(frozen=True)
class Approximation:
    """The rows, and what pictures need."""

    rows: list[Row]  # exact first
    heads: dict[str, dict[str, Tensor]]  # label -> layer -> (h): relative error of each head's output
    maps: dict[str, Head]  # layer -> its typical head
    notes: list[str] = field(default_factory=list)

    @property
    def metric(self) -> str:
        return str(self.rows[0]["metric"])


def approximate(
    loaded: Loaded,
    task: ModelTask,
    batches: Sequence[ModelBatch],
    given: Mapping[str, Given],
    *,
    exact_below: int | None = None,
    only: str | None = None,
    data: str = "",
    looked_at: int = 1,
    tick: Tick | None = None,
) -> Approximation:
    """The task with exact attention and with each method or plan in its place.

    exact_below   as for ``ca.hf.swap``
    only          a regular expression: methods take the place of the layers whose name it finds. Plans name theirs
    looked_at     batches whose every head is looked at, for the heat map and the attention maps
    """
    if not batches:
        raise bad_value("at least one batch", "none", "more data")
    if "exact" in given:
        raise bad_value("methods to stand beside exact attention", "exact itself", "leaving it out: it always comes")
    hf = need("clusterattn.hf", "hf")
    plans = {label: _as_plan(loaded, each, only, exact_below) for label, each in given.items()}
    reports = {label: hf.swap(loaded.model, plan) for label, plan in plans.items()}  # a misfit is refused now
    hf.restore(loaded.model)
    steps = len(batches) * (len(plans) + 2)

    def tell(label: str) -> None:
        if tick is not None:
            tick(label, steps)

    look = _Look(plans)
    tallies = {label: _Tally() for label in ("exact", *plans)}
    with torch.no_grad():
        task.answer(loaded, batches[0])  # whatever is slow only once is slow now
        for number, batch in enumerate(batches):
            tell("looking at exact attention")
            look.closely = number < looked_at
            with hf.observe(loaded.model, look):
                exact = task.answer(loaded, batch)
            for label in tallies:
                tell(label)
                if label != "exact":
                    hf.swap(loaded.model, plans[label])
                try:
                    tallies[label].add(task, loaded, batch, exact)
                finally:
                    hf.restore(loaded.model)
    if not look.shapes:
        why = reports[next(iter(reports))].rows if reports else ()
        reason = f": {why[0].layer}, {why[0].reason}" if why and why[0].reason else ""
        raise bad_value("a model with attention that a method can serve", f"{loaded.name}{reason}", "another model")
    rows = _rows(loaded, task, batches, plans, given, tallies, look, data)
    notes = [
        f"{label}: {len(report.kept)} of {len(report.rows)} attention layers stay exact "
        f"({'; '.join(dict.fromkeys(row.reason for row in report.rows if row.reason))})"
        for label, report in reports.items()
        if report.kept
    ]
    return Approximation(rows, look.errors(), _typical(look), list(dict.fromkeys(notes)))


def _as_plan(loaded: Loaded, given: Given, only: str | None, exact_below: int | None) -> Plan:
    """A method as the plan that gives it to every layer that ``only`` finds."""
    if isinstance(given, Plan):
        return given if exact_below is None else replace(given, exact_below=exact_below)
    names = list(need("clusterattn.hf", "hf").layers(loaded.model))
    if not names:
        wanted = "a model whose attention goes through transformers' attention interface"
        raise bad_value(wanted, type(loaded.model).__name__, "another model; the method itself is ca.attention")
    found = [name for name in names if only is None or re.search(only, name)]
    if not found:
        raise bad_value(f"--layers that finds one of {', '.join(names[:4])}, …", repr(only), f"--layers {names[0]!r}")
    return Plan(dict.fromkeys(found, given), exact_below or 0)


@dataclass
class _Tally:
    """Sums over batches for one method."""

    sums: Sums = field(default_factory=dict)
    miss: float = 0.0
    size: float = 0.0
    seconds: float = 0.0

    def add(self, task: ModelTask, loaded: Loaded, batch: ModelBatch, exact: ModelAnswer) -> None:
        answers: list[ModelAnswer] = []
        self.seconds += once(lambda: answers.append(task.answer(loaded, batch)), loaded.device)
        answer = answers[0]
        for key, value in task.tally(answer, exact, batch, loaded).items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        truth = exact.hidden.double()
        self.miss += float((answer.hidden.double() - truth).square().sum())
        self.size += float(truth.square().sum())

    @property
    def error(self) -> float:
        """Of the hidden states: ‖with the method − with exact attention‖ / ‖with exact attention‖."""
        return float((self.miss / max(self.size, 1e-300)) ** 0.5)


class _Look:
    """What flows through the model with exact attention: the shapes of every call, and close up what each method would
    have answered, head by head, to the very same q, k and v."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self.plans = plans
        self.closely = True
        self.shapes: dict[str, list[cost.Shape]] = {}
        self.heads: dict[str, int] = {}
        self.maps: dict[str, Head] = {}
        self.miss: dict[str, dict[str, Tensor]] = {label: {} for label in plans}
        self.size: dict[str, Tensor] = {}

    def __call__(self, name: str, call: LayerCall) -> None:
        shapes = cost.shapes(call.q, call.k, call.v, call.key_mask, call.query_mask, call.causal)
        self.shapes.setdefault(name, []).extend(shapes)
        self.heads[name] = call.q.shape[1]
        if not self.closely or call.out is None:
            return
        exact = call.out.double()
        errors = {}
        for label, plan in self.plans.items():
            methods = planned(plan, name)
            if methods is None or _refuses(methods, call):
                continue
            missed = _squares(call.answer(methods).double() - exact, call.query_mask)
            self.miss[label][name] = self.miss[label].get(name, torch.zeros(())) + missed
            errors[label] = missed
        size = _squares(exact, call.query_mask)
        self.size[name] = self.size.get(name, torch.zeros(())) + size
        if errors and name not in self.maps:
            self.maps[name] = self._head(name, call, [*errors.values()][-1] / size.clamp_min(1e-300))

    def _head(self, name: str, call: LayerCall, errors: Tensor) -> Head:
        """The head with the median error, of the first sequence: neither the best nor the worst is picked for show."""
        h, hk = call.q.shape[1], call.k.shape[1]
        at = int(errors.argsort()[(h - 1) // 2])
        q, k, v = call.q[0, at], call.k[0, at * hk // h], call.v[0, at * hk // h]
        both = ((q, call.query_mask), (k, call.key_mask), (v, call.key_mask))
        q, k, v = (x if real is None else x[real[0]] for x, real in both)
        methods: dict[str, Method] = {}
        for label, plan in self.plans.items():
            mine = planned(plan, name)
            if mine is not None:
                methods[label] = mine if isinstance(mine, Method) else mine[at]
        q, k, v = (x[None, None].clone() for x in (q, k, v))
        return Head(q, k, v, call.scale, call.causal, at, methods)

    def errors(self) -> dict[str, dict[str, Tensor]]:
        return {
            label: {name: (miss / self.size[name].clamp_min(1e-300)).sqrt() for name, miss in layers.items()}
            for label, layers in self.miss.items()
        }

    def cost(self, plan: Plan | None) -> float:
        total = 0.0
        for name, shapes in self.shapes.items():
            methods = None if plan is None else planned(plan, name)
            below = 0 if plan is None else plan.exact_below
            total += cost.of_layer(Exact() if methods is None else methods, self.heads[name], shapes, below)
        return total


def planned(plan: Plan, name: str) -> LayerPlan | None:
    """The plan's methods for a layer, whose name may be longer or shorter by the name of the model around it."""
    if name in plan.layers:
        return plan.layers[name]
    alike = [key for key in plan.layers if name.endswith("." + key) or key.endswith("." + name)]
    return plan.layers[alike[0]] if alike else plan.layers.get(EVERY)


def _refuses(methods: LayerPlan, call: LayerCall) -> bool:
    each = (methods,) if isinstance(methods, Method) else methods
    crosses = call.q.shape[2] != call.k.shape[2]
    return any((one.self_only and crosses) or (call.causal and one.causality == "no") for one in each)


def _squares(x: Tensor, queries: Tensor | None) -> Tensor:
    """(h): squares of each head, of real queries alone."""
    rows = x.square().sum(-1)  # (b h n)
    return (rows if queries is None else torch.where(queries[:, None], rows, 0.0)).sum((0, 2)).cpu()


def _typical(look: _Look) -> dict[str, Head]:
    names = [name for name, head in look.maps.items() if head.drawable]
    chosen = sorted({0, len(names) // 2, len(names) - 1}) if len(names) > SHOWN_LAYERS else range(len(names))
    return {names[i]: look.maps[names[i]] for i in chosen}


def _rows(
    loaded: Loaded,
    task: ModelTask,
    batches: Sequence[ModelBatch],
    plans: Mapping[str, Plan],
    given: Mapping[str, Given],
    tallies: Mapping[str, _Tally],
    look: _Look,
    data: str,
) -> list[Row]:
    whole, exact = look.cost(None), tallies["exact"]
    lengths = [shape.m for shapes in look.shapes.values() for shape in shapes]
    about = {
        "task": task.name,
        "metric": task.metric,
        "higher_is_better": task.higher,
        "model": loaded.name,
        "data": data,
        "sequences": sum(len(next(iter(batch.inputs.values()))) for batch in batches),
        "keys_mean": sum(lengths) / len(lengths),
        "keys_max": max(lengths),
        "layers": len(look.shapes),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": loaded.device.type,
        "environment": {**environment(loaded.device), "transformers": need("transformers", "hf").__version__},
    }
    rows: list[Row] = []
    for label, tally in tallies.items():
        figures = task.figures(tally.sums) or {task.metric: tally.error}
        one = given.get(label, Exact())
        rows.append(
            {
                "theme": "approximate",
                "method": label,
                "name": one.name if isinstance(one, Method) else "plan",
                "settings": one.to_dict(),
                "value": figures[task.metric],
                "figures": figures,
                "error": tally.error,
                "cost_share": look.cost(plans.get(label)) / max(whole, 1.0),
                "seconds": tally.seconds,
                "speedup": exact.seconds / max(tally.seconds, 1e-12),
                **about,
            }
        )
    for row in rows:
        row["difference"] = row["value"] - rows[0]["value"]
    return rows
