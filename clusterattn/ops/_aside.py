"""Two chains of kernels side by side, in a CUDA graph.

Many kernels of a call fill a small part of a GPU, or wait: for memory, for each other at a barrier. In a graph a chain
that nobody asks for yet runs meanwhile; kernels that are launched one by one would lose more by what two streams ask of
the host (measured: 20 to 40 microseconds of a call). So streams part where a graph is captured:

    with aside(k, v) as chain:
        parts = ...  # runs beside what follows
        chain.gives(parts)
    near = ...
    joined()  # from here on the parts may be read

Whoever opens a chain sees to it that ``joined`` is called, whatever happens; it may be called more often. A recorder
(see _tape.py) notes the chain: its tape may become a graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._launch import recording

STREAMS = 256  # whose companions are remembered before all are forgotten


class Pair:
    """A stream and its companion. What the companion does comes before everything else: somebody will wait for it."""

    def __init__(self, main: Any) -> None:
        cuda: Any = torch.cuda
        self.main, self.side = main, cuda.Stream(main.device, priority=-1)
        self._parted, self._met = cuda.Event(), cuda.Event()

    def part(self) -> None:
        """The companion goes on from where the stream is."""
        self._parted.record(self.main)
        self.side.wait_event(self._parted)

    def meet(self) -> None:
        """The stream waits for what the companion was asked for."""
        self._met.record(self.side)
        self.main.wait_event(self._met)


_pairs: dict[tuple[int, int], Pair] = {}


def pair_of(device: torch.device) -> Pair:
    """Of a GPU's current stream."""
    main = torch.cuda.current_stream(device)
    key = main.device_index, main.cuda_stream
    found = _pairs.get(key)
    if found is None:
        if len(_pairs) >= STREAMS:
            _pairs.clear()
        found = _pairs[key] = Pair(main)
    return found


class Chain:
    """What runs beside. Tensors that it reads stay until it is joined, or their memory could be given away."""

    def __init__(self, reads: tuple[Tensor, ...], pair: Pair | None, recorder: Any) -> None:
        self.pair, self.recorder = pair, recorder
        self._reads = reads
        self._given: list[Tensor] = []

    def gives(self, *made: Tensor | None) -> None:
        """Tensors that will be read once the chain is joined."""
        self._given = [x for x in made if x is not None]

    def join(self) -> None:
        if self.recorder is not None:
            self.recorder.meet()
        if self.pair is not None:
            self.pair.meet()
            for x in self._given:  # it came from the companion's memory, and the stream will be the last to read it
                x.record_stream(self.pair.main)
        self._reads = ()


class _Open(threading.local):
    chain: Chain | None = None


_open = _Open()


@contextmanager
def aside(*reads: Tensor) -> Iterator[Chain]:
    """What is launched within runs beside what follows, until ``joined``. reads: what it needs of what is there."""
    joined()
    like, tape = reads[0], recording.tape
    plain = type(like) is Tensor and not torch._C._are_functorch_transforms_active()
    pair = pair_of(like.device) if plain and like.is_cuda and torch.cuda.is_current_stream_capturing() else None
    _open.chain = chain = Chain(reads, pair, tape if tape is not None and tape.launches else None)
    if chain.recorder is not None:
        chain.recorder.part()
    try:
        if pair is None:
            yield chain
        else:
            pair.part()
            with torch.cuda.stream(pair.side):
                yield chain
    finally:
        if chain.recorder is not None:
            chain.recorder.lane = 0


def joined() -> None:
    """What ran beside is there. (A compiler sees one chain: nothing is put aside while it looks.)"""
    if torch.compiler.is_compiling():
        return
    chain, _open.chain = _open.chain, None
    if chain is not None:
        chain.join()
