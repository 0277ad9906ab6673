"""Choose what serves each layer of a model: the cheapest method, clusters and top inside a tolerance.

Three measurements and one knob.

1. Near: every candidate answers the q, k, v that exact attention hands to a layer. That gives, for each head, what a
   candidate misses there, at the price of attention alone.
2. Gains: one layer at a time is swapped and the whole model runs. That gives how much of a miss in this layer reaches
   the output. Small errors of different layers hardly know each other, so their squares about add up.
3. The knob: the price of a squared error. Given a price, each layer (or head) takes the candidate with the least
   cost + price × predicted squared error at the output. A higher price can only mean a smaller error.

The plan of a price is put in place as a whole and the model's output is measured, errors propagated through all layers;
bisection finds the lowest price that stays inside the tolerance, and last steps try single layers more cheaply. Every
plan that counts was measured end to end: predictions only decide what is tried.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .._errors import bad_value, check_choice
from .._extras import need
from .._plan import LayerPlan, Plan
from .._progress import Tick
from .._rows import environment, hardware
from .._types import Method
from ..measure import cost as costs
from ..methods import Exact, MethodSpec
from ..methods import method as as_method
from .bench import (
    NEAR_BATCHES,
    Bench,
    Layer,
    Memory,
    Output,
    fingerprint,
    hidden_output,
    is_exact,
    usual_candidates,
)

COSTS = ("time", "multiply-adds")
BISECTIONS = 10
HEADS_PAY = 0.02  # of a layer's exact cost: what it must save that heads of one layer are treated differently
PRICES = (-12.0, 12.0)  # powers of ten around the price at which an error as large as the output costs all of attention


def tune(
    model: torch.nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    tolerance: float = 0.02,
    *,
    methods: Sequence[MethodSpec] | None = None,
    cost: str = "time",
    heads: bool = True,
    strict: bool = True,
    only: str | None = None,
    output: Output | None = None,
    state: str | Path | None = None,
    name: str | None = None,
    tick: Tick | None = None,
) -> Plan:
    """The plan with the least cost whose output on these batches stays within ``tolerance`` of exact attention's.

    Args:
        model: a transformers model; it comes back with exact attention
        batches: keyword arguments of the model: a few that are like what it will see, at the lengths it will see
        tolerance: largest ‖output − exact output‖ / ‖exact output‖ with the whole plan in place, over all real
            positions
        methods: candidates, with sizes that they leave open chosen for the layer's longest call; default: Refined from
            few to many clusters, keys and parts, and Local, as the lengths suggest
        cost: "time": measured on this device, one method for each layer; or "multiply-adds" (grouping included)
        heads: let the heads of a layer have different methods where that saves enough
        strict: causal layers get strictly causal methods alone; False: value-causal ones too, for prefill
            (docs/laws.md)
        only: a regular expression: layers whose name it does not find stay exact
        output: what is compared, (rows x): ``output(model, batch)``; default: the last hidden states, else the logits
        state: a file to keep measurements in: a run that was interrupted goes on from there
        name: of the model, for the note in the plan
        tick: called with a word and a count as work goes on

    Layers that no candidate serves inside the tolerance stay exact and are not named in the plan; self- and
    cross-attention are layers of their own. ``plan.note`` holds the measured error, the share of the cost, a row for
    each layer, and the measured ``seconds`` of the model with exact attention and with the plan. When time is the cost
    and the plan is the slower one, exact attention wins: the plan is empty and the note says so.
    """
    shown = [dict(batch) for batch in batches]
    if not shown:
        raise bad_value("at least one batch", "none", "tune(model, [tokenizer(text, return_tensors='pt')])")
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0.0 < tolerance < 1.0:
        raise bad_value("tolerance between 0 and 1", repr(tolerance), "tolerance=0.02")
    check_choice("tune", "cost", cost, COSTS)
    hf = need("clusterattn.hf", "hf")
    names = [each for each in hf.layers(model) if only is None or re.search(only, each)]
    if not names:
        wanted = "a model with attention that a method can serve" + (f", in layers like {only!r}" if only else "")
        raise bad_value(wanted, type(model).__name__, "ca.hf.layers(model), which names them")
    was_training = model.training
    model.eval()
    hf.restore(model)
    try:
        with torch.no_grad():
            what = output or hidden_output
            where = hardware(_device(model)) if cost == "time" else ""
            memory = Memory(state, fingerprint(model, shown, cost, where, getattr(what, "__qualname__", "")))
            bench = Bench(model, shown, what, memory, names, cost)
            by_head = heads and cost == "multiply-adds"
            search = Search(bench, float(tolerance), _candidates(methods), by_head, strict, tick)
            choice, error = search.run()
            seconds = bench.seconds(choice)
            slower = cost == "time" and seconds["tuned"] >= seconds["exact"]
            if slower:
                choice, error = dict.fromkeys(choice, Exact()), 0.0
    finally:
        hf.restore(model)
        model.train(was_training)
    label = name or getattr(getattr(model, "config", None), "name_or_path", "") or ""
    return search.plan(choice, error, seconds, slower, label)


def _device(model: torch.nn.Module) -> torch.device:
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def _candidates(given: Sequence[MethodSpec] | None) -> list[Method] | None:
    if given is None:
        return None
    found = list(dict.fromkeys(as_method(each) for each in given))
    if not found:
        raise bad_value("at least one candidate method", "none", "methods=None for the usual ones")
    return found


def _fitted(given: Sequence[Method], longest: costs.Shape) -> list[Method]:
    """With the sizes they leave open: what a plan holds is what was measured."""
    n, m, d, e = longest.n, longest.m, longest.d, longest.e
    return [
        each
        if longest.causal and each.causality == "no"
        else each.at(n, m, d, e, causal=longest.causal, group=longest.group)
        for each in given
    ]


# ---------------------------------------------------------------------------------------------------- searching


class Search:
    """From measurements to a plan."""

    def __init__(
        self,
        bench: Bench,
        tolerance: float,
        given: Sequence[Method] | None,
        by_head: bool,
        strict: bool,
        tick: Tick | None,
    ) -> None:
        self.bench, self.tolerance, self.given, self.by_head, self.strict = bench, tolerance, given, by_head, strict
        self.tick = tick
        self.layers: dict[str, Layer] = {}
        self.kinds: dict[str, str] = {}
        self.steps = 0

    def run(self) -> tuple[dict[str, LayerPlan], float]:
        self._tell("exact attention")
        met = self.bench.shapes()
        self.kinds = {name: layer.kind for name, layer in met.items()}
        self.layers = {name: layer for name, layer in met.items() if self._prepare(layer)}
        if not self.layers:
            return {}, 0.0
        near = min(len(self.bench.batches), NEAR_BATCHES)
        self.steps = 1 + (near + 2) * len(self.layers) + BISECTIONS
        self.bench.near(self.layers, self._tell)
        for layer in self.layers.values():
            self._only_useful(layer)
        self._gains()
        price, choice, error = self._bisect()
        return self._cheaper(price, choice, error)

    def _tell(self, text: str) -> None:
        if self.tick is not None:
            self.tick(text, max(self.steps, 1))

    def _prepare(self, layer: Layer) -> bool:
        """Candidates for the layer's lengths that can serve it and cost less than exact attention."""
        longest = max(layer.shapes, key=lambda shape: shape.n * shape.m)
        exact = costs.of_layer(Exact(), 1, layer.shapes)
        layer.candidates = [
            each
            for each in (usual_candidates(longest, self.strict) if self.given is None else _fitted(self.given, longest))
            if not isinstance(each, Exact)
            and not (each.self_only and layer.kind == "cross")
            and not (longest.causal and each.causality in (("no", "value") if self.strict else ("no",)))
            and (self.bench.cost == "time" or costs.of_layer(each, 1, layer.shapes) < exact)
        ]
        layer.candidates.append(Exact())
        return len(layer.candidates) > 1

    @staticmethod
    def _only_useful(layer: Layer) -> None:
        """Forget candidates that are dear and far off: another one is at least as good in every head, and cheaper."""
        order = sorted(range(len(layer.candidates)), key=lambda i: (layer.cost[i], sum(layer.miss[i])))
        kept: list[int] = []
        for i in order:
            beaten = any(all(a <= b for a, b in zip(layer.miss[j], layer.miss[i], strict=True)) for j in kept)
            if not beaten and layer.cost[i] <= layer.cost[-1]:
                kept.append(i)
        exact = len(layer.candidates) - 1
        kept = [i for i in kept if i != exact] + [exact]
        layer.candidates = [layer.candidates[i] for i in kept]
        layer.miss = [layer.miss[i] for i in kept]
        layer.cost = [layer.cost[i] for i in kept]

    def _gains(self) -> None:
        """Swap one layer at a time, with the candidate whose own error is nearest the tolerance."""
        for name, layer in self.layers.items():
            self._tell(f"{name} alone")
            if len(layer.candidates) < 2:
                continue
            size = max(sum(layer.size), 1e-300)

            def off(i: int, layer: Layer = layer, size: float = size) -> float:
                own = math.sqrt(sum(layer.miss[i]) / size)
                return abs(math.log(max(own, 1e-12) / self.tolerance))

            probe = min(range(len(layer.candidates) - 1), key=off)
            error = self.bench.error({name: layer.candidates[probe]})
            layer.gain = error**2 / max(sum(layer.miss[probe]), 1e-300)

    def _choose(self, layer: Layer, price: float) -> LayerPlan:
        """The candidate with the least cost + price × predicted squared error: for the layer, or for each head."""
        unit = price * layer.gain * sum(each.exact_cost for each in self.layers.values())
        many = range(len(layer.candidates))

        def whole(i: int) -> float:
            return layer.cost[i] * layer.heads + unit * sum(layer.miss[i])

        best = min(many, key=whole)
        if not self.by_head:
            return layer.candidates[best]
        each = [min((layer.cost[i] + unit * layer.miss[i][h], i) for i in many) for h in range(layer.heads)]
        apart = sum(weighed for weighed, _ in each)
        if whole(best) - apart < HEADS_PAY * layer.exact_cost:
            return layer.candidates[best]
        return tuple(layer.candidates[i] for _, i in each)

    def _at(self, price: float) -> dict[str, LayerPlan]:
        return {name: self._choose(layer, price) for name, layer in self.layers.items()}

    def _bisect(self) -> tuple[float, dict[str, LayerPlan], float]:
        """The lowest price whose plan, as a whole, was measured inside the tolerance. At the highest all is exact."""
        low, high = PRICES
        best: tuple[float, dict[str, LayerPlan], float] = 10.0**high, dict.fromkeys(self.layers, Exact()), 0.0
        predicted = -math.log10(self.tolerance**2)  # where an error of the tolerance and all of attention cost the same
        middle = min(max(predicted, low), high)
        for _ in range(BISECTIONS):
            self._tell("all layers together")
            choice = self._at(10.0**middle)
            error = self.bench.error(choice)
            if error <= self.tolerance:
                high = middle
                if self._cost(choice) <= self._cost(best[1]):
                    best = 10.0**middle, choice, error
            else:
                low = middle
            # Walk first, halve later: the first guess is near, the ends of the scale are far.
            halfway = (low + high) / 2
            middle = max(middle - 1.0, halfway) if error <= self.tolerance else min(middle + 1.0, halfway)
        return best

    def _cheaper(self, price: float, choice: dict[str, LayerPlan], error: float) -> tuple[dict[str, LayerPlan], float]:
        """Try each layer at a lower price, the largest saving for its predicted harm first; keep what stays inside."""
        moves = []
        for name, layer in self.layers.items():
            for part in (0.25, 0.5):
                other = self._choose(layer, price * part)
                saved = self._layer_cost(layer, choice[name]) - self._layer_cost(layer, other)
                harm = layer.gain * (self._missed(layer, other) - self._missed(layer, choice[name]))
                if saved > 0:
                    moves.append((-saved / max(harm, 1e-300), name, other))
        for _, name, other in sorted(moves, key=lambda move: (move[0], move[1]))[: len(self.layers)]:
            self._tell(f"{name} more cheaply")
            tried = {**choice, name: other}
            off = self.bench.error(tried)
            if off <= self.tolerance and self._cost(tried) < self._cost(choice):
                choice, error = tried, off
        return choice, error

    # ------------------------------------------------------------------ what a choice costs and misses

    def _each(self, layer: Layer, given: LayerPlan) -> list[int]:
        methods = [given] * layer.heads if isinstance(given, Method) else list(given)
        return [layer.candidates.index(each) for each in methods]

    def _layer_cost(self, layer: Layer, given: LayerPlan) -> float:
        return sum(layer.cost[i] for i in self._each(layer, given))

    def _missed(self, layer: Layer, given: LayerPlan) -> float:
        return sum(layer.miss[i][h] for h, i in enumerate(self._each(layer, given)))

    def _cost(self, choice: Mapping[str, LayerPlan]) -> float:
        return sum(self._layer_cost(layer, choice[name]) for name, layer in self.layers.items())

    def plan(
        self, choice: Mapping[str, LayerPlan], error: float, seconds: Mapping[str, float], slower: bool, name: str
    ) -> Plan:
        text, transformers = need("clusterattn.hf.swapping", "hf").text, need("transformers", "hf")
        rows = []
        for layer_name in self.bench.names:
            layer = self.layers.get(layer_name)
            given = choice.get(layer_name, Exact())
            share = self._layer_cost(layer, given) / layer.exact_cost if layer else 1.0
            own = math.sqrt(self._missed(layer, given) / max(sum(layer.size), 1e-300)) if layer else 0.0
            kind = self.kinds.get(layer_name, "")
            rows.append({"layer": layer_name, "kind": kind, "method": text(given), "cost_share": share, "error": own})
        whole = sum(layer.exact_cost for layer in self.layers.values())
        note = {
            "model": name,
            "tolerance": self.tolerance,
            "error": error,
            "cost": self.bench.cost,
            "cost_share": self._cost(choice) / whole if choice else 1.0,
            "seconds": dict(seconds),
            "exact_wins": slower or not any(not is_exact(given) for given in choice.values()),
            "sequences": sum(len(next(iter(batch.values()))) for batch in self.bench.batches),
            "layers": rows,
            "environment": {**environment(_device(self.bench.model)), "transformers": transformers.__version__},
        }
        served = {key: given for key, given in choice.items() if not is_exact(given)}
        longest = max((max(each.n, each.m) for layer in self.layers.values() for each in layer.shapes), default=None)
        return Plan(served, note=note, host="transformers", length=longest)
