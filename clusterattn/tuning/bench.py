"""What ``tune`` measures: candidates head by head, the whole model with a plan in place; kept in a file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._errors import bad_type, bad_value
from .._extras import need
from .._files import write_whole
from .._plan import LayerPlan, Plan
from .._rows import dumps, hardware
from .._types import Method
from .._version import __version__
from ..measure import cost as costs
from ..measure.speed import interleaved, once
from ..measure.tasks import real_rows, trunk
from ..methods import Exact, Local, Refined

if TYPE_CHECKING:
    from ..hf import LayerCall

Output = Callable[[Any, Mapping[str, Tensor]], Tensor]
BUDGETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)  # shares of exact attention's multiply-adds
NEAR_BATCHES = 2  # batches on which every candidate answers in every layer


def hidden_output(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """(rows x): the last hidden states at real positions; logits of a model that shows nothing else.

    An encoder-decoder that is given nothing to decode is judged by its encoder.
    """
    mask = batch.get("attention_mask")
    tokens = None if mask is None else mask.bool()
    config = getattr(model, "config", None)
    decodes = any(key.startswith("decoder_") or key == "labels" for key in batch)
    if getattr(config, "is_encoder_decoder", False) and not decodes:
        return real_rows(trunk(model)(**batch)[0], tokens)
    seen: list[Tensor] = []
    core = model if decodes else getattr(model, "base_model", model)
    watch = core.register_forward_hook(lambda module, inputs, out: seen.append(_last(out)))
    try:
        answer = model(**batch)
    finally:
        watch.remove()
    return real_rows(seen[0] if seen else _last(answer), None if decodes else tokens)


def _last(out: Any) -> Tensor:
    for key in ("last_hidden_state", "logits"):
        found = getattr(out, key, None)
        if isinstance(found, Tensor):
            return found
    first = out[0] if isinstance(out, (tuple, list)) else out
    if not isinstance(first, Tensor):
        raise bad_type("a model that returns hidden states or logits", type(out).__name__, "output=a function of yours")
    return first


# ---------------------------------------------------------------------------------------------------- candidates


def usual_candidates(shape: costs.Shape, strict: bool = True) -> list[Method]:
    """Refined from few clusters and keys to many, grouped as it groups by itself, with one far part and at several
    budgets with the usual ones; and Local. Causal layers work by blocks of positions."""
    n, m = shape.n, shape.m
    near = [top for top in (16, 32, 64, 128, 192, 256, 384) if top <= max(m // 2, 16)]
    found: list[Method] = [Local(window=window) for window in near if n == m and window < m]
    if shape.causal:
        source, shared = "past" if strict else "block", True if shape.group > 1 else None  # as sizes left open have it
        sizes: dict[str, Any] = {"parts": 1, "slope": False, "centroids_from": source, "share_heads": shared}
        return found + [
            Refined(clusters=c * shape.group, top=t, block=block, **sizes).at(
                n, m, shape.d, shape.e, causal=True, group=shape.group
            )
            for block in (128, 256)
            for c in (8, 16, 32, 64)
            for t in near
            if n > block
        ]
    few, many = max(8, min(n // 64, 16)), max(16, min(n // 10, 400))
    clusters = sorted({round(few * (many / few) ** (i / 4)) for i in range(5)})
    budgets = [Refined(budget=share).at(n, m, shape.d, shape.e, group=shape.group) for share in BUDGETS]
    sized = [Refined(clusters=c, top=t, parts=1, slope=False) for c in clusters for t in near]
    return [
        *found,
        *dict.fromkeys([*budgets, *(each.at(n, m, shape.d, shape.e, group=shape.group) for each in sized)]),
    ]


# ---------------------------------------------------------------------------------------------------- measuring


class Memory:
    """What was measured, by name, in a file that is whole at any moment. Another model, other data: a new one."""

    def __init__(self, path: str | Path | None, fingerprint: str) -> None:
        self.path = None if path is None else Path(path)
        self.known: dict[str, Any] = {"fingerprint": fingerprint}
        if self.path is not None and self.path.is_file():
            try:
                kept = json.loads(self.path.read_text(encoding="utf-8"))
            except ValueError:
                raise bad_value("a state file of tune", f"{self.path}, which is none", "removing it") from None
            if isinstance(kept, dict) and kept.get("fingerprint") == fingerprint:
                self.known = kept

    def recall(self, key: str, measure: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = measure()
            if self.path is not None:
                write_whole(self.path, dumps(self.known))
        return self.known[key]


def fingerprint(model: torch.nn.Module, batches: Sequence[Mapping[str, Tensor]], *settings: str) -> str:
    """The same model, data and library give the same measurements; anything else must not be mixed with them."""
    words = hashlib.sha256(f"{__version__} {torch.__version__} {settings}".encode())
    words.update(str(getattr(model, "config", "")).encode())
    for key, value in model.state_dict().items():
        flat = value.flatten()[:: max(1, value.numel() // 64)].cpu().double()
        words.update(f"{key} {tuple(value.shape)} {value.dtype} {flat.tolist()}".encode())
    for batch in batches:
        for key in sorted(batch):
            if isinstance(batch[key], Tensor):
                words.update(f"{key} {batch[key].dtype}".encode())
                words.update(batch[key].detach().cpu().double().numpy().tobytes())
    return words.hexdigest()


@dataclass
class Layer:
    """What is known of one layer: its sequences, its candidates, and what each of them misses in each head."""

    heads: int
    shapes: list[costs.Shape] = field(default_factory=list)
    candidates: list[Method] = field(default_factory=list)  # exact last
    miss: list[list[float]] = field(default_factory=list)  # candidate, head: squared miss
    size: list[float] = field(default_factory=list)  # head: squared size of the exact answer
    cost: list[float] = field(default_factory=list)  # candidate: cost of one head
    gain: float = 1.0  # squared error at the output for each unit of squared miss

    @property
    def kind(self) -> str:
        """Of its calls: tokens that look at each other, or at those of another sequence."""
        return "cross" if any(shape.n != shape.m for shape in self.shapes) else "self"

    @property
    def exact_cost(self) -> float:
        return self.cost[-1] * self.heads

    def add(self, table: Mapping[str, Any]) -> None:
        """Take in what was measured on one more batch."""
        found, nothing = [*table["miss"], [0.0] * self.heads], [0.0] * self.heads
        self.miss = [_plus(one, other) for one, other in zip(self.miss or [nothing] * len(found), found, strict=True)]
        self.size = _plus(self.size or nothing, table["size"])
        if table["seconds"] is not None:
            mine = [seconds / self.heads for seconds in table["seconds"]]
            self.cost = _plus(self.cost or [0.0] * len(mine), mine)


class Bench:
    """The model and its batches: everything that is measured is measured here, once."""

    def __init__(
        self,
        model: torch.nn.Module,
        batches: Sequence[Mapping[str, Tensor]],
        output: Output,
        memory: Memory,
        names: Sequence[str],
        cost: str,
    ) -> None:
        self.model, self.batches, self.output, self.memory = model, batches, output, memory
        self.names, self.cost = names, cost
        self.hf = need("clusterattn.hf", "hf")
        self.truth: list[Tensor] = []

    def shapes(self) -> dict[str, Layer]:
        """The layers that a method can serve, with the sequences they meet. Also keeps the exact output."""
        layers: dict[str, Layer] = {}

        def look(name: str, call: LayerCall) -> None:
            if name in self.names:
                met = costs.shapes(call.q, call.k, call.v, call.key_mask, call.query_mask, call.causal)
                layers.setdefault(name, Layer(call.q.shape[1])).shapes.extend(met)

        with self.hf.observe(self.model, look):
            self.truth = [self.output(self.model, batch) for batch in self.batches]
        return layers

    def near(self, layers: dict[str, Layer], tell: Callable[[str], None]) -> None:
        """Fill in what each candidate misses in each head, and what it costs."""
        asked = {name: _digest([str(each) for each in layer.candidates]) for name, layer in layers.items()}
        for number, batch in enumerate(self.batches[:NEAR_BATCHES]):
            keys = {name: f"near {number} {name} {asked[name]}" for name in layers}

            def look(name: str, call: LayerCall, keys: Mapping[str, str] = keys) -> None:
                if name in layers:
                    tell(name)
                    self.memory.recall(keys[name], lambda: self._near(call, layers[name].candidates))

            if not all(key in self.memory.known for key in keys.values()):
                with self.hf.observe(self.model, look):
                    self.output(self.model, batch)
            for name, layer in layers.items():
                table = self.memory.known.get(keys[name])
                if table is not None:
                    layer.add(table)
        for layer in layers.values():
            if self.cost == "multiply-adds":
                layer.cost = [costs.of_layer(each, 1, layer.shapes) for each in layer.candidates]

    def _near(self, call: LayerCall, candidates: Sequence[Method]) -> dict[str, Any]:
        assert call.out is not None
        exact = call.out.double()
        return {
            "miss": [_squares(call.answer(each).double() - exact, call) for each in candidates[:-1]],
            "size": _squares(exact, call),
            "seconds": self._seconds(call, candidates) if self.cost == "time" else None,
        }

    def _seconds(self, call: LayerCall, candidates: Sequence[Method]) -> Any:
        """Of one call of each candidate, taken in turns; layers of one shape take the same time."""
        shape = [*call.q.shape, *call.k.shape, *call.v.shape, call.causal, call.key_mask is None]

        def measure() -> list[float]:
            runs = {str(i): partial(call.answer, each) for i, each in enumerate(candidates)}
            taken = interleaved(runs, repetitions=3, device=call.q.device, seconds=60.0)
            return [min(taken[name]) for name in runs]

        return self.memory.recall(f"seconds {shape} {_digest([str(each) for each in candidates])}", measure)

    def seconds(self, choice: Mapping[str, LayerPlan], repetitions: int = 3) -> dict[str, float]:
        """Of the whole model on the first batch, with exact attention and with these methods, in turns."""
        layers = {name: given for name, given in choice.items() if not is_exact(given)}
        device = next((each.device for each in self.model.parameters()), torch.device("cpu"))
        plan = Plan(layers)

        def measure() -> dict[str, float]:
            taken: dict[str, list[float]] = {"exact": [], "tuned": []}
            for _ in range(repetitions):
                for name, times in taken.items():
                    if name == "tuned" and layers:
                        self.hf.swap(self.model, plan)
                    try:
                        run = partial(self.output, self.model, self.batches[0])
                        run()
                        times.append(once(run, device))
                    finally:
                        self.hf.restore(self.model)
            return {name: min(times) for name, times in taken.items()}

        key = f"whole {hardware(device)} {_digest(plan.to_dict()['layers'])}"
        return dict(self.memory.recall(key, measure))

    def error(self, choice: Mapping[str, LayerPlan]) -> float:
        """Of the model's output with these methods in place, all of them at once."""
        layers = {name: given for name, given in choice.items() if not is_exact(given)}
        if not layers:
            return 0.0
        plan = Plan(layers)

        def measure() -> float:
            self.hf.swap(self.model, plan)
            try:
                miss = size = 0.0
                for batch, truth in zip(self.batches, self.truth, strict=True):
                    exact = truth.double()
                    miss += float((self.output(self.model, batch).double() - exact).square().sum())
                    size += float(exact.square().sum())
            finally:
                self.hf.restore(self.model)
            return math.sqrt(miss / max(size, 1e-300))

        return float(self.memory.recall(f"error {_digest(plan.to_dict()['layers'])}", measure))


def _digest(words: Any) -> str:
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:32]


def _squares(x: Tensor, call: LayerCall) -> list[float]:
    rows = x.square().sum(-1)  # (b h n)
    if call.query_mask is not None:
        rows = torch.where(call.query_mask[:, None], rows, 0.0)
    found: list[float] = rows.sum((0, 2)).tolist()
    return found


def _plus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]


def is_exact(given: LayerPlan) -> bool:
    each = (given,) if isinstance(given, Method) else given
    return all(isinstance(one, Exact) for one in each)
