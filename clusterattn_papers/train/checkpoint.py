"""A training that can be killed at any moment: its whole state is one safetensors file, replaced in one move."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clusterattn._errors import bad_value
from clusterattn._extras import need
from clusterattn._files import write_whole

VERSION = 1


def write(
    path: Path,
    state: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    progress: dict[str, Any],
    recipe: str,
) -> None:
    tensors = {f"model.{name}": each for name, each in state.items()}
    numbers: dict[str, Any] = {}
    if optimizer is not None:
        for at, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                (tensors if isinstance(value, Tensor) else numbers)[f"optimizer.{at}.{name}"] = value
    about = json.dumps({"version": VERSION, "recipe": recipe, "progress": progress, "numbers": numbers})
    write_whole(path, packed(tensors, {"clusterattn": about}))


def packed(tensors: Mapping[str, Tensor], about: dict[str, str] | None = None) -> bytes:
    """As safetensors, from copies: it refuses tied weights, which share their memory."""
    whole = {name: each.detach().to("cpu", copy=True).contiguous() for name, each in tensors.items()}
    data: bytes = need("safetensors.torch", "train").save(whole, about)
    return data


def read(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str) -> dict[str, Any]:
    """Load into model and optimizer; the progress that was written with them."""
    tensors, about = _opened(path)
    if about["recipe"] != recipe:
        wanted = "the model, data and settings with which the training in this folder began"
        raise bad_value(wanted, f"others ({path.parent})", "another folder, or deleting this one")
    model.load_state_dict(_of_model(tensors))
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *about["numbers"].items()]:
        if name.startswith("optimizer."):
            _, at, key = name.split(".", 2)
            state.setdefault(int(at), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    progress: dict[str, Any] = about["progress"]
    return progress


def weights(path: Path) -> dict[str, Tensor]:
    """The model's part alone."""
    return _of_model(_opened(path)[0])


def _opened(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with need("safetensors", "train").safe_open(path, "pt") as file:
        about = json.loads((file.metadata() or {}).get("clusterattn", "{}"))
        if about.get("version") != VERSION:
            raise bad_value(f"a checkpoint of version {VERSION}", f"{path}: {about.get('version')}", "another folder")
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118


def _of_model(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[6:]: each for name, each in tensors.items() if name.startswith("model.")}
