"""Updates as CUDA graphs: small models spend their time launching kernels, a graph launches all of them at once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from ..tasks import Batch

log = logging.getLogger(__name__)

SIGHTINGS = 2  # a shape that comes more often is worth a graph; the first sightings also compile what needs compiling


class RecordedUpdate:
    """An update that is recorded once for every shape of batch and replayed from then on.

    ``update`` takes a batch and returns the loss: forward, backward, clipping, the optimizer's step, gradients set to
    None. It must not wait for the device, and what is to change from one replay to the next (batch, learning rate,
    seeds of the methods' draws) must stand in tensors. Where recording fails, updates stay as they are and the log says
    why.
    """

    def __init__(self, update: Callable[[Batch], Tensor]) -> None:
        self.update = update
        self.seen: Counter[object] = Counter()
        self.graphs: dict[object, tuple[torch.cuda.CUDAGraph, Batch, Tensor]] = {}
        self.pool: object = None
        self.refused = False

    def __call__(self, batch: Batch) -> Tensor:
        key = tuple((name, tuple(each.shape), each.dtype) for name, each in sorted(batch.items()))
        self.seen[key] += 1
        if key not in self.graphs and (self.refused or self.seen[key] <= SIGHTINGS):
            return self.update(batch)
        if key not in self.graphs and not self._record(key, batch):
            return self.update(batch)
        graph, held, loss = self.graphs[key]
        for name, each in batch.items():
            held[name].copy_(each)
        graph.replay()
        return loss

    def _record(self, key: object, batch: Batch) -> bool:
        held = {name: each.clone() for name, each in batch.items()}
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self.pool):  # type: ignore[arg-type]
                loss = self.update(held)
        except Exception as error:
            self.refused = True
            torch.cuda.synchronize()
            cause: BaseException = error  # leaving the recording complains as well; what broke it came first
            while cause.__context__ is not None:
                cause = cause.__context__
            log.warning("updates are not recorded as CUDA graphs: %s", str(cause).split("\n")[0])
            return False
        self.pool = self.pool or graph.pool()
        self.graphs[key] = graph, held, loss
        return True
