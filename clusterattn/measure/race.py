"""Methods against the best exact attention there is, on one device, in one process: proved right, then timed.

Both sides are timed as CUDA graphs, all stages included, with the eager time beside; the floor is q, k, v and out
once through memory, at the speed of a copy measured in the same run. A method that is wrong gets no time.
"""

from __future__ import annotations

import gc
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._attention import attention, groups
from .._rows import Row, environment
from .._types import Method
from ..methods import Auto
from . import bench as parts
from . import cost
from .bench import GRADIENTS, MEMORY_BY, PASSES, PEER
from .error import exact_answer, relative_error
from .sample import Sample, Shape, mixture
from .speed import Run, Timed, copy_speed, first_line, peak_memory, timed

EXACT_ROWS = 512  # the error against exact attention is that of so many queries of each head, spread evenly
EXACT_BATCH = 2  # … in the first few sequences
OUTDONE = 1.2  # a backend that is so many times slower at one length is not asked again at longer ones
# How far out (beside 8 roundings) and gradients may be from the reference's at the very length that is timed. Only
# gross errors are looked for there, such as overflowing offsets: the proof on a slice is the strict one. Gradients
# have more room, as near keys that tie may swap, and each takes its share of a query's gradient with it.
DRIFT, GRADIENT_DRIFT = 1e-3, 0.5


class Race:
    """One run. What is measured once serves all rows: the copy, exact attention for each shape, each proof."""

    def __init__(
        self,
        device: str | torch.device,
        dtype: torch.dtype,
        *,
        causal: bool = False,
        seed: int = 0,
        seconds: float = 0.1,
        theme: str = "bench",
        commit: str | None = None,
        data: Sample | Callable[[Shape], Sample] | None = None,
    ) -> None:
        """data: to time on, the beginning of these tensors, or a function of the shape; None: a synthetic mixture."""
        self.device, self.dtype, self.causal, self.seed = torch.device(device), dtype, causal, seed
        self.seconds, self.theme, self.data = seconds, theme, data
        self.environment = environment(self.device)
        if commit is not None:  # where the files came without their history
            self.environment["commit"] = commit
        if self.device.type == "cuda":
            self.environment |= {"cuda": torch.version.cuda, "cudnn": _cudnn()}
            with suppress(importlib.metadata.PackageNotFoundError):
                self.environment["triton"] = importlib.metadata.version("triton")
        self.bytes_per_second = copy_speed(self.device, *([] if self.device.type == "cuda" else [2**24]))
        self._sample: tuple[Shape, Sample] | None = None
        self._peers: dict[tuple[Shape, str], Row | None] = {}
        self._outdone: dict[tuple[int, int, str, str], int] = {}  # h, d, pass, backend -> from which length on
        self._faults: dict[tuple[str, int, int, int, bool], str | None] = {}

    def rows(
        self,
        method: Method,
        shape: Shape,
        *,
        passes: Sequence[str] = PASSES,
        peer: bool = True,
        memory: bool = True,
    ) -> Iterator[Row]:
        """A row for each pass, after one for exact attention where this shape is new. Failures become rows too."""
        for which in passes:
            known = (shape, which) in self._peers
            exact, failed = None, None
            row: Row = {}
            try:
                exact = self._peer(shape, which) if peer else None
                if exact is not None and not known:
                    yield exact
                row = self._measured(method, shape, which, exact, memory, prove_both=PASSES[1] in passes)
            except torch.OutOfMemoryError as error:
                failed = f"out of memory ({first_line(error)})"
            except Exception as error:  # whatever a kernel throws: the other rows are still worth having
                failed = first_line(error)
            if failed is not None:  # past the except clauses, whose tracebacks hold tensors
                row = {**self._about(str(method), shape, which), "failed": failed}
                self._free()
            yield row

    def alive(self) -> bool:
        """Does the device still answer? After an illegal access it does not, until the process ends."""
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    # ------------------------------------------------------------------ a method

    def _measured(
        self, method: Method, shape: Shape, which: str, exact: Row | None, memory: bool, prove_both: bool
    ) -> Row:
        sample, backward = self._data(shape), which == PASSES[1]
        about = self._about(str(method), shape, which)
        proved = method
        if isinstance(method, Auto):
            _, h, n, m, d, e = sample.shape
            at = cost.Shape(n, m, d, e, self.causal, h // sample.k.shape[1])
            proved = method.choose(self.device, self.dtype, shape[0] * shape[1], at)
            about["chosen"] = proved.name
        fault = self._fault(sample, proved, prove_both)
        if fault is not None and (backward or fault.startswith("out")):
            return {**about, "failed": f"wrong: {fault}"}
        run, forward = (
            parts.pass_of(sample, method, causal=self.causal, backward=each, seed=self.seed)
            for each in (backward, False)
        )
        answer = _tensors(run())  # compiles, where something must be
        fault, checked = self._drift(sample, proved, answer, backward)
        if fault is not None:
            return {**about, "failed": f"wrong: {fault}"}
        held = peak_memory(run, self.device) if memory else None
        clock = timed(run, self.device, seconds=self.seconds)
        same = clock.replay is None or self._replayed(clock, answer)
        if isinstance(same, str):
            return {**about, "failed": f"wrong: {same}"}
        (out,) = _tensors(forward()) if backward else answer
        return {
            **self._timings(about, sample, which, clock, held),
            **_against(clock.seconds, clock.eager, held, exact),
            "error": self._error(sample, out),
            "error_rows": EXACT_ROWS,
            "checked_lengths": [min(shape[2], parts.CHECKED_LENGTH), *([shape[2]] if checked else [])],
            "same_bits": same,
        }

    def _fault(self, sample: Sample, method: Method, backward: bool) -> str | None:
        """The proof on a slice, once for all lengths of one setting; backward's includes forward's."""
        _, h, n, _, d, _ = sample.shape
        key = (str(method), h, d, min(n, parts.CHECKED_LENGTH), backward)
        if key not in self._faults:
            self._faults[key] = parts._fault(sample, method, self.causal, backward, self.seed)
            self._free()
        return self._faults[key]

    def _drift(
        self, sample: Sample, method: Method, answer: Sequence[Tensor], backward: bool
    ) -> tuple[str | None, bool]:
        """At the length that is timed: is the answer the reference's, as far as roundings let it be? And was there
        memory to find out: kernels may split long inputs in other ways than the short ones they are proved on."""
        options: dict[str, Any] = {"method": method, "causal": self.causal, "seed": self.seed}
        limit = GRADIENT_DRIFT if backward else 8 * torch.finfo(self.dtype).eps + DRIFT
        leaves = [x.detach().requires_grad_(backward) for x in (sample.q, sample.k, sample.v)]
        try:
            given = groups(sample.q, sample.k, sample.v, **options)
            with torch.set_grad_enabled(backward):
                out = attention(*leaves, groups=given, backend="reference", **options)
            right = {"out": out}
            if backward:
                grads = torch.autograd.grad(out, leaves, parts.direction(sample), allow_unused=True)
                right = {name: x for name, x in zip(GRADIENTS, grads, strict=True) if x is not None}
            for ours, (name, usual) in zip(answer, right.items(), strict=True):
                miss = _apart(ours, usual)
                if not miss <= limit:
                    return f"{name} is off by {miss:.3g} in l2 from the reference, {limit:.3g} is allowed", True
        except torch.OutOfMemoryError:
            return None, False
        return None, True

    def _replayed(self, clock: Timed, answer: Sequence[Tensor]) -> bool | str:
        """Does the graph give what the call gave? True: the same bits. A sentence: something else."""
        assert clock.replay is not None
        replayed = _tensors(clock.replay.answer)
        if all(torch.equal(x, y) for x, y in zip(answer, replayed, strict=True)):
            return True
        miss = max(_apart(x, y) for x, y in zip(replayed, answer, strict=True))
        limit = 8 * torch.finfo(self.dtype).eps
        return False if miss <= limit else f"the graph's answer is {miss:.3g} from the eager one in l2"

    def _error(self, sample: Sample, out: Tensor) -> float:
        """Relative output error against exact attention, on some queries with all of their keys."""
        n, few = sample.q.shape[2], slice(0, EXACT_BATCH)
        rows: Any = slice(max(n - EXACT_ROWS, 0), n)  # causal: the last ones stay beside the last keys
        if not self.causal and n > EXACT_ROWS:
            rows = torch.arange(EXACT_ROWS, device=self.device) * n // EXACT_ROWS
        q, k, v = sample.q[few][:, :, rows], sample.k[few], sample.v[few].float()
        return relative_error(out[few][:, :, rows], exact_answer(q, k, v, causal=self.causal, dtype=v.dtype, block=64))

    # ------------------------------------------------------------------ exact attention

    def _peer(self, shape: Shape, which: str) -> Row | None:
        """The fastest backend of SDPA for this shape, measured once."""
        if (shape, which) in self._peers:
            return self._peers[shape, which]
        sample, backward = self._data(shape), which == PASSES[1]
        plain = parts.peer_pass(sample, causal=self.causal, backward=backward)
        found: dict[str, tuple[Timed, int]] = {}
        for name, run in self._backends(plain, shape, which, found):
            held = self._try(run)
            if held is not None:
                found[name] = timed(run, self.device, seconds=self.seconds), held
                self._free()
        row = None
        if found:
            best = min(found, key=lambda name: found[name][0].seconds)
            clock, held = found[best]
            for name, (other, _) in found.items():
                if other.seconds > OUTDONE * clock.seconds:
                    self._outdone[_family(shape, which, name)] = shape[2]
            row = {
                **self._timings(self._about(PEER, shape, which), sample, which, clock, held),
                "peer": best,
                "backends": {name: other.seconds for name, (other, _) in found.items()},
                "eager_seconds": min(other.eager for other, _ in found.values()),
            }
            row |= _against(clock.seconds, row["eager_seconds"], held, row)
        self._peers[shape, which] = row
        return row

    def _backends(
        self, plain: Run, shape: Shape, which: str, found: dict[str, Any]
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        if self.device.type != "cuda":
            yield PEER, plain
            return
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            name = f"{PEER} {backend.name.split('_')[0].lower()}"
            if backend is SDPBackend.EFFICIENT_ATTENTION and found:
                return  # it is there for what the other two do not serve (fp32)
            if shape[2] > self._outdone.get(_family(shape, which, name), shape[2]):
                continue

            def run(backend: SDPBackend = backend) -> object:
                with sdpa_kernel(backend):
                    return plain()

            yield name, run

    def _try(self, run: Run) -> int | None:
        """Peak bytes of a backend's first call; None when it does not take this dtype, shape or GPU."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch explains at length why a backend declines
                return peak_memory(run, self.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return None

    # ------------------------------------------------------------------ what all rows say

    def _about(self, label: str, shape: Shape, which: str) -> Row:
        return {
            "theme": self.theme,
            "method": label,
            **dict(zip("bhnd", shape, strict=True)),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "causal": self.causal,
            "pass": which,
            "environment": self.environment,
        }

    def _timings(self, about: Row, sample: Sample, which: str, clock: Timed, held: int | None) -> Row:
        """``size``: bytes of q, k, v and out, and with backward of their gradients."""
        b, h, n, _, _, e = sample.shape
        size = sum(x.nbytes for x in (sample.q, sample.k, sample.v)) + b * h * n * e * sample.v.itemsize
        size *= 2 if which == PASSES[1] else 1
        floor = size / self.bytes_per_second
        return {
            **about,
            "seconds": clock.seconds,
            "seconds_per_token": clock.seconds / (b * n),
            "eager_seconds": clock.eager,
            "host_seconds": clock.host,
            "timed_as": "eager" if clock.replay is None else "cuda graph",
            "why_eager": clock.why_eager,
            "repetitions": clock.repetitions,
            "floor_seconds": floor,
            "floor_ratio": clock.seconds / floor,
            "copy_bytes_per_second": self.bytes_per_second,
            "memory_bytes": held,
            "memory_per_token": None if held is None else held / (b * n),
            "memory_of_size": None if held is None else held / size,
            "memory_by": MEMORY_BY[self.device.type],
            "data": sample.source,
        }

    def _data(self, shape: Shape) -> Sample:
        if self._sample is None or self._sample[0] != shape:
            self._sample = None
            self._free()
            if self.data is None:
                sample = drawn_there(shape, self.device, self.dtype, self.seed)
            elif isinstance(self.data, Sample):
                sample = self.data.cut(shape[0], shape[2]).to(self.device, self.dtype)
            else:
                sample = self.data(shape).to(self.device, self.dtype)
            self._sample = shape, sample
        return self._sample[1]

    def _free(self) -> None:
        if self.device.type == "cuda" and self.alive():
            gc.collect()
            torch.cuda.empty_cache()


def drawn_there(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> Sample:
    """``sample.mixture``, drawn on the device itself: a CPU takes longer over a million tokens than all else here."""
    if device.type == "cpu":
        return mixture(*shape, seed=seed).to(device, dtype)
    b, h, n, d = shape
    centres, spread = 100, 0.35
    draw = torch.Generator(device).manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(b, h, count, d, generator=draw, device=device)

    def around(middles: Tensor, kinds: Tensor) -> Tensor:
        return normal(n).mul_(spread).add_(middles.gather(2, kinds.expand(-1, -1, -1, d))).to(dtype)

    middles, contents = normal(centres), normal(centres)
    asked, held = (torch.randint(centres, (b, h, n, 1), generator=draw, device=device) for _ in range(2))
    return Sample(
        q=around(middles, asked),
        k=around(middles, held),
        v=around(contents, held),
        source=f"a mixture of {centres} Gaussians per head (spread {spread}, seed {seed})",
    )


def _family(shape: Shape, which: str, name: str) -> tuple[int, int, str, str]:
    """Shapes that differ in length and batch alone."""
    return shape[1], shape[3], which, name


def _cudnn() -> int | None:
    cudnn: Any = torch.backends.cudnn
    version: int | None = cudnn.version()
    return version


def _tensors(answer: object) -> list[Tensor]:
    """What a pass gives: out, or the gradients that there are."""
    return [answer] if isinstance(answer, Tensor) else [x for x in answer if x is not None]  # type: ignore[attr-defined]


def _apart(x: Tensor, right: Tensor) -> float:
    """‖x − right‖ / ‖right‖."""
    return float((x.float() - right.float()).norm() / right.float().norm().clamp_min(1e-30))


def _against(seconds: float, eager: float, held: int | None, exact: Row | None) -> Row:
    """Beside the best of SDPA called in the same way: as a graph, and from Python."""
    if exact is None:
        return {}
    share = None if held is None or exact["memory_bytes"] is None else held / max(exact["memory_bytes"], 1)
    return {
        "peer": exact["peer"],
        "peer_seconds": exact["seconds"],
        "speedup": exact["seconds"] / seconds,
        "peer_eager_seconds": exact["eager_seconds"],
        "eager_speedup": exact["eager_seconds"] / eager,
        "memory_share": share,
    }
