"""Two chains of kernels side by side, in a CUDA graph.

Many kernels of a call fill a small part of a GPU, or wait: for memory, for each other at a barrier. In a graph another
chain runs meanwhile; kernels that are launched one by one would lose more by what two streams ask of the host (20 to 40
microseconds of a call). So streams part where a graph is captured:

    part(k, c)  # from here on a chain may run that reads nothing else
    ...  # the caller's
    with beside(c, k) as chain:
        near = ...  # runs since ``part``
        chain.gives(near)
    ...  # the caller's, too
    joined()  # from here on near may be read

So near keys run beside the making of parts; or, where parts need no clusters, these beside clusters and near keys.
Whoever parts sees to it that ``joined`` is called, whatever happens; it may be called more often. A recorder (see
_recorder.py) notes the chain: its tape may become a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ._launch import aside, joined, recording

STREAMS = 256  # whose companions are remembered before all are forgotten


class Pair:
    """A stream and its companion, for what can wait."""

    def __init__(self, main: Any) -> None:
        cuda: Any = torch.cuda
        self.main, self.side = main, cuda.Stream(main.device)
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
    """What runs beside, and may read. Tensors that it reads stay until it is joined: their memory is not given away."""

    def __init__(self, there: tuple[Tensor, ...], pair: Pair | None, recorder: Any) -> None:
        self.there, self.pair, self.recorder = there, pair, recorder
        self._given: list[Tensor] = []

    def serves(self, reads: tuple[Tensor, ...]) -> bool:
        """Was all of this there when the streams parted? Not a copy that was made since."""
        return {x.data_ptr() for x in reads} <= {x.data_ptr() for x in self.there}

    def gives(self, *made: Tensor | None) -> None:
        """Tensors that will be read once the chain is joined."""
        self._given += (x for x in made if x is not None)

    def join(self) -> None:
        if self.recorder is not None:
            self.recorder.meet()
        if self.pair is not None:
            self.pair.meet()
            for x in self._given:  # it came from the companion's memory, and the stream will be the last to read it
                x.record_stream(self.pair.main)


def part(*there: Tensor) -> None:
    """From here on ``beside`` may run, reading these alone."""
    joined()
    like, tape = there[0], recording.tape
    plain = type(like) is Tensor and not torch._C._are_functorch_transforms_active()
    pair = pair_of(like.device) if plain and like.is_cuda and torch.cuda.is_current_stream_capturing() else None
    recorder = tape if tape is not None and tape.launches else None
    if pair is None and recorder is None:
        return
    aside.chain = Chain(there, pair, recorder)
    if recorder is not None:
        recorder.part()
    if pair is not None:
        pair.part()


@contextmanager
def beside(*reads: Tensor) -> Iterator[Chain]:
    """What is launched within runs beside what the caller launches since ``part`` until ``joined``; what reads more
    than was there then runs as the caller's."""
    chain = aside.chain
    if chain is None or not chain.serves(reads):
        yield Chain((), None, None)
        return
    if chain.recorder is not None:
        chain.recorder.lane = 1
    try:
        with nullcontext() if chain.pair is None else torch.cuda.stream(chain.pair.side):
            yield chain
    finally:
        if chain.recorder is not None:
            chain.recorder.lane = 0
