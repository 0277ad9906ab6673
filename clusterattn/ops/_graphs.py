"""Plays that come again, as CUDA graphs: one launch for all of their kernels.

A tape is played with addresses. Memory comes from torch's caching allocator, which gives a loop (the layers of a model,
the steps of a training) the same addresses in every round; and the same kernels with the same numbers and addresses are
a CUDA graph. One that came twice is captured, and from then on it is launched as a whole. Nothing is allocated inside a
graph, and none holds memory of the call: one whose addresses never come again is only forgotten.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ._aside import Pair

MOST = 256  # graphs that are held
IDLE = 4096  # plays without it after which a graph gives way to another
SEEN = 4096  # plays that are remembered, whether they come again

Run = Callable[[int, Pair | None], None]  # on a stream, by its address; with its companion


class Graphs:
    """The graphs of a process, and what was played lately."""

    def __init__(self) -> None:
        self.on = True
        self._held: OrderedDict[Hashable, Any] = OrderedDict()  # the one that was not used for longest comes first
        self._used: dict[Hashable, int] = {}
        self._seen: dict[Hashable, bool] = {}  # is it worth a graph?
        self._plays = 0
        self._books, self._capturing = threading.Lock(), threading.Lock()
        self._pairs: dict[torch.device, Pair] = {}

    def __len__(self) -> int:
        return len(self._held)

    def forget(self) -> None:
        with self._books:
            self._held.clear()
            self._used.clear()
            self._seen.clear()

    def play(self, key: Hashable, device: torch.device, run: Run, stream: int) -> None:
        """As a graph, where there is one; by ``run`` otherwise, at first."""
        with self._books:
            self._plays += 1
            graph = self._known(key)
            wanted = graph is None and self._again(key) and self._fits()
        if wanted and self._capturing.acquire(blocking=False):  # or another thread is at it
            try:
                graph = self._captured(device, run)
                with self._books:
                    self._keep(key, graph)
            finally:
                self._capturing.release()
        if graph is None:
            run(stream, None)
        else:
            graph.replay()

    def _known(self, key: Hashable) -> Any:
        graph = self._held.get(key)
        if graph is not None:
            self._used[key] = self._plays
            self._held.move_to_end(key)
        return graph

    def _again(self, key: Hashable) -> bool:
        """Has it been seen before?"""
        worth = self._seen.get(key)
        if worth is None:
            if len(self._seen) >= SEEN:
                self._seen.clear()
            self._seen[key] = True
        return bool(worth)

    def _fits(self) -> bool:
        """Is there place for one more; or can one go that nobody has asked for lately? Those in use would come back at
        once."""
        if len(self._held) < MOST:
            return True
        oldest = next(iter(self._held))
        if self._plays - self._used[oldest] < IDLE:
            return False
        del self._held[oldest], self._used[oldest]
        return True

    def _keep(self, key: Hashable, graph: Any) -> None:
        if graph is None:
            self._seen[key] = False
        else:
            self._held[key], self._used[key] = graph, self._plays

    def _captured(self, device: torch.device, run: Run) -> Any:
        """A graph of what ``run`` launches; None where there can be none. (While torch captures, its generator of this
        device refuses random numbers to other threads.)"""
        cuda: Any = torch.cuda
        try:
            if device not in self._pairs:
                self._pairs[device] = Pair(cuda.Stream(device, priority=-1))
            pair, graph = self._pairs[device], cuda.CUDAGraph()
            with cuda.stream(pair.main):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    run(pair.main.cuda_stream, pair)
                finally:
                    graph.capture_end()
        except Exception as reason:  # somebody else captures whatever happens in this process
            logging.getLogger("clusterattn").debug("a call could not become a graph: %s", reason)
            return None
        return graph


graphs = Graphs()
