"""Where Refined overtakes exact attention on this machine: a few constants for each pass, from calls of two lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._attention import attention
from .._progress import Tick
from .._rows import commit, environment
from ..methods import Exact, Method, Refined
from ..methods.auto import PASSES, place
from .sample import mixture
from .speed import interleaved

LENGTHS = {"cpu": (2048, 8192), "cuda": (8192, 65536)}


def crossings(
    device: str | torch.device = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    *,
    kinds: Sequence[bool] = (False, True),
    heads: int = 4,
    dim: int = 64,
    lengths: tuple[int, int] | None = None,
    repetitions: int = 5,
    tick: Tick | None = None,
) -> list[dict[str, Any]]:
    """An entry for ``methods.auto.keep`` for every dtype and kind (causal or not): how long a call takes by itself, and
    how many multiply-adds it does in a second, for Exact and for Refined with its usual sizes. On an idle machine,
    please."""
    where = torch.device(device)
    short, long = lengths or LENGTHS.get(where.type, LENGTHS["cpu"])
    entries = []
    for dtype in dtypes:
        for causal in kinds:
            taken: dict[int, dict[str, float]] = {}
            for n in (short, long):
                if tick is not None:
                    tick(f"{dtype}, {'causal, ' if causal else ''}{n} tokens", 2 * len(kinds) * len(dtypes))
                taken[n] = _seconds(n, heads, dim, where, dtype, causal, repetitions)
            passes = {
                each: {
                    method.name: _line(method, each, taken, heads, dim, causal, where.type)
                    for method in (Exact(), Refined())
                }
                for each in PASSES
            }  # fmt: skip
            around = environment(where)
            source = f"measured at {short} and {long} tokens, {heads} heads of {dim}, {around['date']}, {commit()}"
            entries.append(
                {
                    "device": place(where, torch.get_num_threads()),
                    "dtypes": [str(dtype).removeprefix("torch.")],
                    "causal": causal,
                    "passes": passes,
                    "source": source,
                }
            )
    return entries


def _seconds(
    n: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype, causal: bool, repetitions: int
) -> dict[str, float]:
    sample = mixture(1, heads, n, dim).to(device, dtype)
    runs: dict[str, Callable[[], object]] = {}
    for method in (Exact(), Refined()):
        for each in PASSES:
            runs[f"{method.name} {each}"] = partial(
                _run, sample.q, sample.k, sample.v, method, causal, each != PASSES[0]
            )
    taken = interleaved(runs, repetitions=repetitions, device=device, seconds=60.0)
    return {name: min(seconds) for name, seconds in taken.items()}


def _run(q: Tensor, k: Tensor, v: Tensor, method: Method, causal: bool, backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
        out = attention(*leaves, method=method, causal=causal)
        if backward:
            out.sum().backward()  # type: ignore[no-untyped-call]


def _line(
    method: Method, which: str, taken: dict[int, dict[str, float]], heads: int, dim: int, causal: bool, kind: str
) -> tuple[float, float, float]:
    """Through two points: (seconds of a call, of each row, multiply-adds in a second). What does not grow with the
    length is the host's work on a GPU, once for a call, and small products on a CPU, for every head."""
    (short, long) = taken
    work = [heads * method.cost(n, n, dim, dim, causal=causal) for n in (short, long)]
    seconds = [taken[n][f"{method.name} {which}"] for n in (short, long)]
    rate = (work[1] - work[0]) / max(seconds[1] - seconds[0], 1e-9)
    fixed = max(seconds[0] - work[0] / rate, 0.0)
    return (0.0, fixed / heads, rate) if kind == "cpu" else (fixed, 0.0, rate)
