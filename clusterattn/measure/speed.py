"""Time and peak memory of a call, measured against a peer in the same run.

Time: the runs take turns (a, b, c, a, b, c, …), so a slow moment of the machine falls on all of them alike;
the minimum counts, since noise only ever adds. CUDA is timed with events, the CPU with the wall clock. On CUDA
``timed`` also replays the run as a CUDA graph: that is what the GPU needs, without what Python takes to ask for it.

Memory: the peak of what torch's own allocator hands out during the call, above what it held before (so inputs
do not count, the answer does). On CUDA that is ``max_memory_allocated``; on the CPU torch's profiler reports
every allocation and release, and the highest sum is the peak. It leaves out fragmentation and what libraries
allocate behind torch's back; ``resident_growth`` counts those too, for a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], object]
BLOCK = 2e-3  # seconds of replays between two events: their own cost (about a microsecond) must not show
COPIED, COPIES = 2**29, 8  # bytes that a copy moves (ten times what the largest caches hold), and how often


def warn_when_busy(device: str | torch.device) -> None:
    """Threads of a CPU that has other work wait for one another at the end of every operator. Exact attention is a few
    operators, the other methods are many: what is measured then is the waiting."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if torch.device(device).type != "cpu" or threads == 1:
        return
    taken = cores_taken()
    if taken is not None and taken + threads > cores + 0.5:
        warnings.warn(
            f"other programs take {taken:.1f} of {cores} cores, and {threads} threads are wanted here: times will say "
            "little, and too little good of every method but exact. Better: an idle machine, or OMP_NUM_THREADS=1",
            stacklevel=2,
        )


def cores_taken(seconds: float = 0.2) -> float | None:
    """How many cores others keep busy while this process sleeps; None where the system does not tell (not Linux)."""

    def ticks() -> tuple[int, int]:
        line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
        spent = [int(each) for each in line.split()[1:9]]
        return sum(spent), spent[3] + spent[4]  # all, idle

    try:
        before = ticks()
        time.sleep(seconds)
        whole, idle = (after - first for after, first in zip(ticks(), before, strict=True))
    except (OSError, ValueError, IndexError):
        return None
    return (1 - idle / whole) * (os.cpu_count() or 1) if whole > 0 else None


@dataclass(frozen=True)
class Timed:
    """How long one call takes."""

    seconds: float  # the figure that counts: as a graph where there is one
    eager: float  # called from Python, one call at a time
    host: float  # until Python has the call behind it, whatever the device still has to do
    repetitions: int
    replay: Replay | None  # the captured graph
    why_eager: str | None  # why there is none


@dataclass(frozen=True)
class Replay:
    """A captured run. Its answer lies in the same memory after every replay."""

    graph: Any
    answer: object

    def __call__(self) -> object:
        self.graph.replay()
        return self.answer


def interleaved(
    runs: Mapping[str, Run],
    *,
    repetitions: int = 5,
    warmup: int = 1,
    device: str | torch.device = "cpu",
    seconds: float | None = None,
    progress: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every repetition of every run. ``seconds``: start no round but the first past that.

    Args:
        runs: name -> a call without arguments
        repetitions: rounds, in which each run has one turn
        warmup: rounds before that
        device: to wait for
        seconds: no round but the first starts later than that
        progress: called after each turn
    """
    started = time.perf_counter()
    for _ in range(warmup):
        for run in runs.values():
            run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repetitions):
        if seconds is not None and turn and time.perf_counter() - started > seconds:
            break
        for name, run in runs.items():
            taken[name].append(once(run, device))
            if progress is not None:
                progress()
    return taken


def once(run: Run, device: str | torch.device = "cpu") -> float:
    """Seconds of one call."""
    if torch.device(device).type == "cuda":
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) / 1e3
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def once_alone(run: Run, device: str | torch.device = "cpu") -> float:
    """As ``once``; but on a CPU with one thread by this process's own clock, which other programs cannot stretch."""
    if torch.device(device).type != "cpu" or torch.get_num_threads() != 1:
        return once(run, device)
    started = time.process_time()
    run()
    return time.process_time() - started


def timed(run: Run, device: str | torch.device = "cpu", *, seconds: float = 0.2) -> Timed:
    """Time a run that has been warmed up, in about 3 × ``seconds`` (more only where a few calls take longer)."""
    eager, turns = _fastest(run, device, seconds)
    if torch.device(device).type != "cuda":
        return Timed(eager, eager, eager, turns, None, None)
    host = on_the_host(run, device, seconds, eager)
    try:
        replay = captured(run)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return Timed(eager, eager, host, turns, None, first_line(error))
    taken, turns = _fastest(replay, device, seconds)
    return Timed(taken, eager, host, turns, replay, None)


def on_the_host(run: Run, device: str | torch.device, seconds: float, call: float) -> float:
    """Seconds until Python has a call behind it: the median of some, each begun with nothing left to do on the device.

    Args:
        run: a call without arguments
        device: to wait for between calls
        seconds: for all of them, three calls at least
        call: what one takes with the device's part
    """
    taken = []
    for _ in range(min(max(int(seconds / max(call, 1e-9)), 3), 30)):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    torch.cuda.synchronize(device)
    return statistics.median(taken)


def captured(run: Run) -> Replay:
    """One call as a CUDA graph: inputs stay where they are, everything else (gradients too) is allocated inside."""
    cuda: Any = torch.cuda
    before, side = cuda.current_stream(), cuda.Stream()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its debug mode a prototype, once per process
        side.wait_stream(before)
        asked = cuda.get_sync_debug_mode()
        try:  # what waits for the GPU can not be captured: found out here, where it does no harm
            cuda.set_sync_debug_mode("error")
            with cuda.stream(side):
                run()
        finally:
            cuda.set_sync_debug_mode(asked)
            before.wait_stream(side)
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    try:
        with cuda.graph(graph, stream=side):
            answer = run()
    finally:
        cuda.set_stream(before)  # a capture that fails leaves its own stream behind
    return Replay(graph, answer)


def _fastest(run: Run, device: str | torch.device, seconds: float) -> tuple[float, int]:
    """The fastest turn of a few, each of so many calls that the clock's own cost does not show; and how many calls."""
    first = once(run, device)
    calls = max(1, ceil(BLOCK / max(first, 1e-9))) if isinstance(run, Replay) else 1
    least = 2 if first <= 3 * seconds else 1  # over so long a call, moments of noise even out by themselves
    turns = min(max(int(seconds / max(first * calls, 1e-9)), least), 12)

    def turn() -> None:
        for _ in range(calls):
            run()

    taken = [first, *(once(turn, device) / calls for _ in range(turns))]
    return min(taken), 1 + turns * calls


def copy_speed(device: str | torch.device, size: int = COPIED) -> float:
    """Bytes per second of a copy within the device's memory, read and written bytes together."""
    source = torch.ones(size // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)

    def several() -> None:  # in a row, so that only the first one is waited for
        for _ in range(COPIES):
            target.copy_(source)

    several()
    return 2 * size * COPIES / min(once(several, device) for _ in range(5))


def first_line(error: BaseException) -> str:
    """The kind of an error and what it says, without the pages that torch adds."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no words').splitlines()[0]}"


def peak_memory(run: Run, device: str | torch.device = "cpu") -> int:
    """Peak bytes of torch's allocator during one call, above what was held before it.

    Args:
        run: a call without arguments
        device: whose memory
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held

    from torch.autograd.profiler import profile

    watch: Any = profile(profile_memory=True)
    with _quiet():
        watch.__enter__()
    try:
        answer = run()
    finally:
        with _quiet():
            watch.__exit__(None, None, None)
    del answer
    changes = [
        (event.start_ns(), event.nbytes()) for event in watch.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        held += size
        peak = max(peak, held)
    return peak


def resident_growth(run: Run) -> int:
    """Peak growth of the resident memory of this whole process during one call (Linux).

    Honest only in a young process: memory that an earlier call left in malloc's pockets would be used again
    unseen. Free pockets are returned and the peak mark is reset first.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # 5: reset the high-water mark
    before = _status("VmRSS")
    answer = run()
    peak = _status("VmHWM")
    del answer
    return max(peak - before, 0)


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Some builds of torch's profiler write a line to file descriptor 2 at start and stop."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # no stderr at all
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
