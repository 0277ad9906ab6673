"""A few processes on gloo, each running one function."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _one(rank: int, world: int, folder: str, work: Callable[..., Any], timeout: float, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    try:
        found: Any = work(rank, world, *args)
    except Exception as error:
        traceback.print_exc()
        found = error
    torch.save(found, Path(folder) / f"{rank}.pt")
    if not isinstance(found, Exception):
        dist.barrier()
    dist.destroy_process_group()


def run(work: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0, check: bool = True) -> list[Any]:
    """``work(rank, world, *args)`` on every rank: what each returned or raised; None for one that died. check: the
    first error, if any, is raised here."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, world, folder, work, timeout, args) for rank in range(world)]
        processes = [context.Process(target=_one, args=each) for each in given]
        for each in processes:
            each.start()
        for each in processes:
            each.join(timeout + 60)
        places = [Path(folder) / f"{rank}.pt" for rank in range(world)]
        found = [torch.load(place, weights_only=False) if place.exists() else None for place in places]
    for each in found:
        if check and isinstance(each, Exception):
            raise each
    return found
