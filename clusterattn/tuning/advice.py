"""Is it worth it here? One machine's advice about one shape of attention, or about a model: ``ca.advise``.

Everything is measured on this machine: the error of a few settings on q, k, v that a model made, and the time and the
memory of the cheapest one inside the tolerance beside exact attention, at growing lengths. Where the time allowed runs
out before the length that was asked about, the rest is predicted from multiply-adds, and marked as such.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_value, check_whole
from .._plan import EVERY, Plan
from .._progress import Tick
from .._rows import Row, environment
from .._types import Method
from ..measure.bench import PASSES, PEER, pass_of, peer_pass
from ..measure.cost import Shape, multiply_adds, share
from ..measure.plots_speed import crossing
from ..measure.race import drawn_there
from ..measure.sample import Sample, embedded
from ..measure.sampled import error_report
from ..measure.speed import interleaved, peak_memory
from ..measure.words import human_bytes, human_error
from ..methods import Exact, Refined
from ..methods.auto import GAIN, keep
from .bench import BUDGETS

TOLERANCE = {"attention": 0.05, "model": 0.02}  # of a call's output; of a model's last hidden states
SHORTEST = 256  # tokens: below, nobody waits for attention
FARTHEST = 64  # times the length that was asked about: as far as a crossing is looked for
ERROR_QUERIES = 256  # of each head, on which an error is measured


@dataclass(frozen=True)
class Candidate:
    """A setting that was tried: its share of exact attention's multiply-adds, and its error on the data."""

    method: Method
    cost_share: float
    error: float
    inside: bool  # the tolerance


@dataclass(frozen=True)
class Advice:
    """What ``ca.advise`` found. Its text is the answer in a few lines; ``plan`` is what to do.

    Attributes:
        about: the shape or the model
        length: that was asked about, in tokens
        worth: is it? If not: use exact attention
        answer: in a sentence
        crossing: the length from which it pays; None: none was found
        plan: empty where exact attention is the answer
        tolerance: that was asked for
        error: with the plan's methods; of the closest where none is inside the tolerance
        rows: exact attention ("sdpa") and ours at growing lengths: seconds, memory, measured or predicted
        candidates: what was tried, with its error and its cost
        notes: what else there is to say, a sentence each
        crossings_file: where this machine's crossings lie now, by which method="auto" goes
    """

    about: str
    length: int
    worth: bool
    answer: str
    crossing: int | None
    plan: Plan
    tolerance: float
    error: float | None
    rows: tuple[Row, ...]
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    crossings_file: Path | None = None

    @property
    def speedup(self) -> float | None:
        """Times as fast as exact attention at the length that was asked about; None where nothing was timed."""
        seconds = {row["method"] == PEER: row["seconds"] for row in self.rows if row["n"] == self.length}
        return seconds[True] / seconds[False] if len(seconds) == 2 else None

    def __str__(self) -> str:
        return "\n".join([self.about, self.answer, *self.notes])


class Phases:
    """Progress of work in several phases, each of which counts its own steps."""

    def __init__(self, tick: Tick | None) -> None:
        self.tick, self.before, self.done = tick, 0, 0

    def __call__(self, text: str, total: int) -> None:
        self.done += 1
        if self.tick is not None:
            self.tick(text, self.before + total)

    def next(self) -> Phases:
        self.before = self.done
        return self


def advise(
    model: torch.nn.Module | None = None,
    batches: Iterable[Mapping[str, Tensor]] | None = None,
    *,
    heads: int | None = None,
    dim: int | None = None,
    length: int | None = None,
    batch: int = 1,
    causal: bool = False,
    backward: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    data: Sample | None = None,
    store: bool = True,
    seconds: float = 60.0,
    repetitions: int = 3,
    state: str | Path | None = None,
    name: str | None = None,
    tick: Tick | None = None,
) -> Advice:
    """Is attention by clustering worth it on this machine: from which length, with which sizes, at what error?

    Of attention itself: ``ca.advise(heads=16, dim=64, length=30_000)``

    Of a model: ``ca.advise(model, batches)``, with ``ca.tune`` behind it

    Args:
        model: a transformers model; heads, dim and length are its own then
        batches: as for ``ca.tune``: a few that are like what the model will see, at the length it will see
        heads: query heads of a call
        dim: of a head
        length: queries and keys of a call
        batch: sequences in a call
        causal: whether calls are causal
        backward: time training steps: forward and backward
        device: where calls run; a model's own
        dtype: of the calls; None: fp32, on CUDA bf16
        tolerance: the largest ‖out − exact‖ / ‖exact‖, over all heads (None: 0.05), or of a model's last hidden states
            (None: 0.02)
        data: q, k, v to measure errors on; None: the long sample inside the package, 8 192 rows of a table that a
            pretrained model reads
        store: keep this machine's crossings for ``method="auto"`` (as ``clusterattn calibrate`` does, about a minute)
        seconds: for timing at growing lengths, about; what is longer is predicted
        repetitions: turns that both take at each length; the fastest counts
        state: as for ``ca.tune``
        name: as for ``ca.tune``
        tick: called with a word and a count as work goes on

    Returns:
        an ``Advice``: print it, save its ``plan``. On a machine that has nothing else to do, please
    """
    if (model is None) == (heads is None and dim is None and length is None):
        got = "neither" if model is None else "both"
        raise bad_value("heads, dim and length, or a model and batches", got, "advise(heads=16, dim=64, length=30_000)")
    check_whole("advise", batch=batch, repetitions=repetitions)
    allowed = TOLERANCE["attention" if model is None else "model"] if tolerance is None else tolerance
    if isinstance(allowed, bool) or not isinstance(allowed, (int, float)) or not 0.0 < allowed < 1.0:
        raise bad_value("tolerance between 0 and 1", repr(tolerance), "tolerance=0.05")
    phases = Phases(tick)
    if model is not None:
        from .model_advice import advise_model

        found = advise_model(model, batches, float(allowed), repetitions, state, name, phases)
        first = next(iter(model.parameters()), None)
        if first is not None:
            device, dtype = first.device, first.dtype
        kinds: tuple[bool, ...] = (False, True)
    else:
        if batches is not None or heads is None or dim is None or length is None:
            got = f"heads={heads}, dim={dim}, length={length}" + (" and batches" if batches is not None else "")
            raise bad_value("heads, dim and length, all three", got, "advise(heads=16, dim=64, length=30_000)")
        check_whole("advise", heads=heads, dim=dim, length=length)
        device = torch.device(device)
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        shape = Shape(length, length, dim, dim, causal)
        attention = _Attention(shape, batch, heads, backward, device, dtype, float(allowed), phases)
        found = attention.advise(data or embedded("long"), seconds, repetitions)
        kinds = (causal,)
    if not store:
        return found
    from ..measure.crossings import crossings

    assert dtype is not None
    return replace(found, crossings_file=keep(crossings(device, (dtype,), kinds=kinds, tick=phases.next())))


# ---------------------------------------------------------------------------------------------------- times


@dataclass(frozen=True)
class Times:
    """Seconds at a few lengths; between and beyond them by work, along straight lines."""

    measured: Mapping[int, float]
    work: Callable[[int], float]  # of a length

    def at(self, n: int) -> float:
        known = sorted(self.measured)
        if n in self.measured:
            return self.measured[n]
        if len(known) == 1 or n < known[0]:
            return self.measured[known[0]] * self.work(n) / self.work(known[0])
        left = max((each for each in known[:-1] if each < n), default=known[0])
        right = known[known.index(left) + 1]
        rate = (self.measured[right] - self.measured[left]) / max(self.work(right) - self.work(left), 1.0)
        # the longest call at least as fast as it was for its work: noise must not make time stand still
        rate = max(rate, 0.25 * self.measured[right] / max(self.work(right), 1.0)) if n > right else max(rate, 0.0)
        return self.measured[left] + rate * (self.work(n) - self.work(left))


def pays_from(exact: Times, ours: Times, farthest: int) -> int | None:
    """The length from which ours stays clearly faster (by the share that ``method="auto"`` asks for)."""
    grid = {round(min(ours.measured) * 2 ** (i / 4)) for i in range(120)}
    lengths = sorted({n for n in grid if n <= farthest} | set(ours.measured))
    found = crossing({n: ours.at(n) / GAIN for n in lengths}, {n: exact.at(n) for n in lengths})
    return None if found is None else round(found[0])


def lengths_up_to(length: int, shortest: int = SHORTEST) -> list[int]:
    """The length, its half, its quarter, ... from the shortest on."""
    found = [length]
    while found[-1] // 2 >= shortest:
        found.append(found[-1] // 2)
    return found[::-1]


# ---------------------------------------------------------------------------------------------------- one shape


@dataclass(frozen=True)
class _Attention:
    """A shape of attention on this machine."""

    shape: Shape  # of the longest call
    batch: int
    heads: int
    backward: bool
    device: torch.device
    dtype: torch.dtype
    tolerance: float
    tick: Tick

    @property
    def which(self) -> str:
        return PASSES[self.backward]

    @property
    def about(self) -> str:
        kind = "causal, " if self.shape.causal else ""
        words = str(self.dtype).removeprefix("torch.")
        return f"{self.batch} × {self.heads} heads of {self.shape.d}, {kind}{self.which}, {words}"

    def advise(self, data: Sample, seconds: float, repetitions: int) -> Advice:
        length = self.shape.n
        steps = len(_candidates(self.shape)) + len(lengths_up_to(length))
        tried, notes = self._errors(data, steps)
        inside = [each for each in tried if each.inside and each.cost_share < 1.0]
        chosen = min(inside, key=lambda each: each.cost_share) if inside else min(tried, key=lambda each: each.error)
        exact, ours, rows = self._times(chosen.method, seconds, repetitions, steps)
        at = pays_from(exact, ours, FARTHEST * length)
        faster = exact.at(length) / ours.at(length)
        worth = bool(inside) and at is not None and at <= length
        if any(not row["measured"] for row in rows):
            longest = max(row["n"] for row in rows if row["measured"])
            notes.append(f"timed up to {longest} tokens; longer calls are predicted from their multiply-adds")
        error = f"error {human_error(chosen.error)}, tolerance {self.tolerance:g}"
        speed = f"{faster:.3g} times as fast as exact attention"
        if worth:
            held = self._memory(rows)
            answer = f"Worth it from {at} tokens on: at {length} {speed} ({error}), with {chosen.method}{held}."
        elif not inside:
            answer = (
                f"Use exact attention: nothing cheaper stays within {self.tolerance:g} of it. "
                f"The closest, {chosen.method}, is off by {human_error(chosen.error)} (at {length} tokens {speed})."
            )
        elif at is None:
            answer = f"Use exact attention: {chosen.method} ({error}) is {speed} and does not overtake it."
        else:
            answer = (
                f"Use exact attention: at {length} tokens {chosen.method} ({error}) is {speed}; "
                f"it would pay from about {at} tokens on."
            )
        around = environment(self.device)
        note = {
            "about": self.about, "tolerance": self.tolerance, "error": chosen.error, "exact_wins": not worth,
            "seconds": {"exact": exact.at(length), "ours": ours.at(length)}, "data": data.source, "environment": around,
        }  # fmt: skip
        plan = Plan({EVERY: chosen.method} if worth else {}, (at or 0) if worth else 0, note, length=length)
        return Advice(
            self.about, length, worth, answer, at, plan, self.tolerance, chosen.error, tuple(rows), tuple(tried),
            tuple(notes),
        )  # fmt: skip

    def _errors(self, data: Sample, steps: int) -> tuple[list[Candidate], list[str]]:
        """What each candidate misses on the data, the cheapest first."""
        b, h, n, _, d, _ = data.shape
        n = min(n, self.shape.n)
        at = data.cut(b, n).to(self.device, self.dtype)
        found = []
        for method in _candidates(self.shape):
            self.tick(f"error of {method}", steps)
            seen = error_report(
                at.q, at.k, at.v, _along(method, self.shape.d, d), sample=min(ERROR_QUERIES, max(n, 8)),
                key_mask=at.key_mask, query_mask=at.query_mask, causal=self.shape.causal,
            )  # fmt: skip
            found.append(Candidate(method, share(method, self.shape), seen.error, seen.error <= self.tolerance))
        notes = [f"errors: on {n} tokens of {data.source}"]
        if n < self.shape.n:
            notes.append(f"with the same sizes {self.shape.n} tokens are further off than {n}: check on data of yours")
        if self.backward:
            notes.append("errors are those of the output; the gradients' were not measured")
        return sorted(found, key=lambda each: each.cost_share), notes

    def _times(self, method: Method, seconds: float, repetitions: int, steps: int) -> tuple[Times, Times, list[Row]]:
        """Of exact attention and the method, and a row for each at every length."""
        started, shared = time.perf_counter(), self._shared()
        taken: dict[str, dict[int, float]] = {PEER: {}, str(method): {}}
        held: dict[tuple[str, int], int] = {}
        times = {
            PEER: Times(taken[PEER], partial(self._work, Exact())),
            str(method): Times(taken[str(method)], partial(self._work, method)),
        }
        lengths = lengths_up_to(self.shape.n)
        for n in lengths:
            left = seconds - (time.perf_counter() - started)
            # a call to warm up, one that counts and one under the profiler
            if n != lengths[0] and 3 * sum(each.at(n) for each in times.values()) > left:
                break
            self.tick(f"time at {n} tokens", steps)
            sample = drawn_there((self.batch, self.heads, n, self.shape.d), self.device, self.dtype, 0)
            causal, backward = self.shape.causal, self.backward
            runs = {
                PEER: peer_pass(sample, causal=causal, backward=backward),
                str(method): pass_of(sample, method, causal=causal, backward=backward),
            }
            turns = interleaved(runs, repetitions=repetitions, device=self.device, seconds=left / 2)
            for label, run in runs.items():
                taken[label][n], held[label, n] = min(turns[label]), peak_memory(run, self.device)
        rows = [
            {"theme": "advise", "method": label, "n": n, "seconds": times[label].at(n), "measured": n in taken[label],
             "seconds_per_token": times[label].at(n) / (n * self.batch), "memory_bytes": held.get((label, n)), **shared}
            for n in lengths for label in times
        ]  # fmt: skip
        return times[PEER], times[str(method)], rows

    def _work(self, method: Method, n: int) -> float:
        return float(self.batch * self.heads * multiply_adds(method, replace(self.shape, n=n, m=n)))

    def _shared(self) -> Row:
        return {
            "b": self.batch, "h": self.heads, "d": self.shape.d, "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type, "causal": self.shape.causal, "pass": self.which,
            "environment": environment(self.device),
        }  # fmt: skip

    @staticmethod
    def _memory(rows: list[Row]) -> str:
        """Of the longest calls that were measured, in words."""
        longest = max(row["n"] for row in rows if row["measured"])
        exact, ours = (human_bytes(row["memory_bytes"]) for row in rows if row["n"] == longest)
        return f"; beside q, k and v it holds {ours} at {longest} tokens, exact attention {exact}"


def _candidates(shape: Shape) -> list[Method]:
    """Refined with its usual sizes, and at several budgets."""
    sizes: dict[str, Any] = {"causal": shape.causal, "group": shape.group}
    budgets = (None, *BUDGETS)
    return list(dict.fromkeys(Refined(budget=each).at(shape.n, shape.m, shape.d, shape.e, **sizes) for each in budgets))


def _along(method: Method, wanted: int, given: int) -> Method:
    """On data of another dimension: a method that uses every direction still does."""
    return replace(method, rank=given) if isinstance(method, Refined) and method.rank == wanted else method
