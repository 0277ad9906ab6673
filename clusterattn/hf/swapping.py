"""Swap the attention of a pretrained model for a method, and put it back. Weights, state dict and config.json stay."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from .._errors import bad_type, bad_value
from .._plan import LayerPlan, Plan, choose
from .._report import LayerRow, Report, text
from .._types import Method
from ..methods import METHODS, Exact, MethodSpec
from .over_ranks import shared_out
from .register import STAMP, SWAPPED, Stamp

HOST = "transformers"  # in plans
BEFORE = "_clusterattn_before"  # the attribute of a swapped model: its configs and their implementations before


def swap(
    model: nn.Module,
    method: MethodSpec | Plan | None = None,
    *,
    exact_below: int | None = None,
    seed: int = 0,
    parallel: ProcessGroup | DeviceMesh | None = None,
) -> Report:
    """Let a method, or a plan's methods, answer for the model's attention layers. Nothing but attributes changes.

    Args:
        model: a transformers model that uses the attention interface, or a module that holds some
        method: None: the plan that came with the model, in its config or in its folder (see ``Plan``)
        exact_below: shorter sequences (of queries or of keys) stay exact; None: as the plan says, or 0
        seed: of what the methods draw: the same seed, the same answers
        parallel: a process group or a DeviceMesh of one dimension: every rank runs the model on its share of the tokens
            (with the position ids of its share) and attention goes over all of them, by ``ca.parallel``. Models with a
            layer that cannot are refused: exact attention would see the share alone

    Layers that no method can honour stay exact, and the report says why. Swapping again replaces the first swap.
    """
    model = plain(model)
    found = find(model)
    if not found:
        torchs = any(isinstance(each, nn.MultiheadAttention) for each in model.modules())
        raise bad_value(
            "a model whose attention goes through transformers' attention interface",
            f"{type(model).__name__}, where no layer does",
            "ca.nn.swap, for torch's nn.MultiheadAttention" if torchs else "another model; the method is ca.attention",
        )
    chosen = choose(method, model, HOST, [each.name for each in found], exact_below)
    below = chosen.exact_below
    reasons = [chosen.why_exact(each.name, _is_cross(each)) for each in found]
    methods = [Exact() if why else chosen.layers[each.name] for each, why in zip(found, reasons, strict=True)]
    stamps = [replace(make_stamp(each, method, below), seed=seed) for each, method in zip(found, methods, strict=True)]
    if parallel is not None:
        stamps = [shared_out(stamp, each.module, parallel) for stamp, each in zip(stamps, found, strict=True)]

    restore(model)  # from here on nothing can fail
    before = attach(model, found, stamps)
    setattr(model, BEFORE, [pair for pair in before if pair[1] != SWAPPED])  # the others another swap will put back
    rows = (LayerRow(s.name, text(s.method), s.why_exact or why) for s, why in zip(stamps, reasons, strict=True))
    return Report(tuple(rows), below)


def restore(model: nn.Module) -> None:
    """Undo ``swap``: what answered before answers again. Does nothing to a model that was not swapped.

    Args:
        model: what was swapped
    """
    for module in plain(model).modules():
        vars(module).pop(STAMP, None)
        put_back(vars(module).pop(BEFORE, []))


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules that can be swapped, by their names in ``model.named_modules()``.

    Args:
        model: a transformers model, or a module that holds one
    """
    return {each.name: each.module for each in find(plain(model)) if not why_exact(each)}


# ---------------------------------------------------------------------------------------------------- finding


class FoundLayer(NamedTuple):
    name: str
    module: Any  # an nn.Module; its attributes differ from model to model
    owner: PreTrainedModel  # the model that it is a part of


def plain(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise bad_type("a model (torch.nn.Module)", type(model).__name__, "AutoModel.from_pretrained(...)")
    return getattr(model, "_orig_mod", model)  # what torch.compile wrapped


def find(model: nn.Module) -> list[FoundLayer]:
    """Every module that asks the attention interface, in order."""
    owners: dict[str, PreTrainedModel] = {}
    found = []
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            owners[name] = module
        if _asks_interface(type(module)) and isinstance(getattr(module, "config", None), PretrainedConfig):
            inside = [at for at in owners if not at or name == at or name.startswith(at + ".")]
            if inside:
                found.append(FoundLayer(name, module, owners[max(inside, key=len)]))
    return found


def _asks_interface(kind: type[nn.Module]) -> bool:
    """Attention modules look their implementation up in a table of this name."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


CROSS = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)


def _is_cross(each: FoundLayer) -> bool:
    return bool(CROSS.search(each.name) or CROSS.search(type(each.module).__name__))


# ---------------------------------------------------------------------------------------------------- what stays exact


def why_exact(each: FoundLayer) -> str:
    """What is known beforehand to keep a layer exact, whatever the method; "" if nothing is."""
    module, config = each.module, each.module.config
    if not hasattr(module, "is_causal"):
        return "it does not say whether it is causal"
    if hasattr(module, "has_relative_attention_bias"):
        return "it adds a position bias to the logits"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "it caps its logits (softcap)"
    if getattr(module, "sinks", None) is not None:
        return "attention sinks take part in its softmax"
    window = _window(module, config)
    if window:
        return window
    if not getattr(each.owner, "_supports_flash_attn", False):
        return f"{type(each.owner).__name__} changes masks on their way to its layers"
    return ""


def _window(module: Any, config: Any) -> str:
    types, at = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types and at is not None and at < len(types) and types[at] != "full_attention":
        return f"its keys are limited ({types[at].replace('_', ' ')})"
    if hasattr(module, "sliding_window"):
        size = module.sliding_window
    else:
        size = None if types else getattr(config, "sliding_window", None)
    return f"its keys are limited (sliding window of {size})" if size not in (None, 0, -1) else ""


def make_stamp(each: FoundLayer, method: LayerPlan, exact_below: int) -> Stamp:
    why = why_exact(each) or _why_not(each, method)
    already = getattr(each.module, STAMP, None)  # a second swap must remember what was there before the first
    eager = already.eager if already else each.module.config._attn_implementation == "eager"
    alone = not _is_cross(each) and "decoder" not in each.name
    return Stamp(each.name, Exact() if why else method, exact_below, why, eager, alone)


def _why_not(each: FoundLayer, methods: LayerPlan) -> str:
    """Is it this method that keeps the layer exact? A method that cannot serve a causal layer is refused."""
    for method in (methods,) if isinstance(methods, Method) else methods:
        if each.module.is_causal and method.causality == "no":
            able = [name for name, kind in METHODS.items() if kind().causality != "no"]
            raise bad_value(
                f"a method that can be causal for {each.name}: {', '.join(able)}", str(method), "one of these"
            )
        if method.self_only and _is_cross(each):
            return f"{type(method).__name__} is self-attention only"
    heads = getattr(each.module.config, "num_attention_heads", None)
    if not isinstance(methods, Method) and heads not in (None, len(methods)):
        raise bad_value(f"a method for each of {heads} heads of {each.name}", f"{len(methods)}", "one for all heads")
    return ""


# ---------------------------------------------------------------------------------------------------- configs

Implementations = list[tuple[Any, str | None]]  # configs and the attention implementations that they name


def _configs(model: nn.Module) -> list[Any]:
    """Every config that the model reads, parents before their parts."""
    known: dict[int, Any] = {}

    def walk(config: Any) -> Iterator[Any]:
        yield config
        for part in getattr(config, "sub_configs", {}):
            if getattr(config, part, None) is not None:
                yield from walk(getattr(config, part))

    for module in model.modules():
        if isinstance(getattr(module, "config", None), PretrainedConfig):
            for config in walk(module.config):
                known.setdefault(id(config), config)
    return list(known.values())


def attach(model: nn.Module, found: list[FoundLayer], stamps: list[Stamp]) -> Implementations:
    """Stamp the layers and let the configs of those that a method may serve name us. Returns what they named before."""
    for each, stamp in zip(found, stamps, strict=True):
        setattr(each.module, STAMP, stamp)
    serving = {id(each.module.config) for each, stamp in zip(found, stamps, strict=True) if not stamp.why_exact}
    before = [(config, config._attn_implementation) for config in _configs(model)]
    put_back([(config, SWAPPED if id(config) in serving else was) for config, was in before])
    return before


def put_back(implementations: Implementations) -> None:
    """Setting a config's implementation sets that of its parts too, so parents come first."""
    for config, implementation in implementations:
        config._attn_implementation = implementation
