"""diffusers (0.42 or later): attention by clustering as one of its attention backends.

    ca.hosts.diffusers.register(min_length=4096)
    pipe.transformer.set_attention_backend("clusterattn")

serves a whole model. ``swap`` serves it layer by layer, with dense layers, dense first steps, or a plan:

    print(ca.hosts.diffusers.swap(pipe.transformer, dense_steps=5, dense_layers=[0, 1]))

What a method cannot honour is answered by SDPA, as diffusers' native backend would, and said once in the log.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from .._errors import bad_type, bad_value
from .._plan import LayerPlan, Plan, check_exact_below, check_stateless, choose
from .._report import LayerRow, text
from ..methods import Exact, MethodSpec
from ..methods import method as as_method
from ._dispatch import DiffusersBackend, Steps
from ._served import CallCounts, Swapped, need

__all__ = ["register", "restore", "swap", "unregister"]

NAME = "clusterattn"
HOST = "diffusers"  # in plans
METHOD: MethodSpec = "auto"
MIN_LENGTH = 4096
SWAPPED = "_clusterattn"  # the attribute of a swapped model: what undoes the swap

_fresh = itertools.count(1)


def register(
    method: MethodSpec = METHOD,
    *,
    min_length: int = MIN_LENGTH,
    exact_rows: int = 0,
    joint: bool = False,
    cross: bool = False,
) -> CallCounts:
    """Make "clusterattn" one of diffusers' attention backends: ``model.set_attention_backend("clusterattn")``.

    Args:
        method: answers for every attention layer of the models that are set to this backend. "auto": Refined where it
            is faster on this device, SDPA elsewhere
        min_length: calls with fewer queries or keys stay exact
        exact_rows: so many rows at the beginning of a sequence are answered exactly: conditioning tokens (text, a first
            frame). Negative: at its end
        joint: these rows are a stream of their own (the text of Flux or Qwen-Image), which context parallelism shares
            out by itself. Without it, and with exact_rows=0 in such a model, a rank of Ulysses sees tokens in another
            order than one device, and draws differ
        cross: cross-attention (another number of keys than queries) too. Under context parallelism each rank groups its
            own queries then, and answers depend on the number of ranks

    Returns the counts of how calls are answered from now on; print them. Registering again replaces the settings.
    """
    method = as_method(method)
    check_stateless(method)
    backend = _backend(method, min_length, exact_rows, joint, cross, None, CallCounts())
    names = _dispatch().AttentionBackendName
    member = names._value2member_map_.get(NAME) or _member(NAME)
    names._value2member_map_[NAME] = names._member_map_[member.name] = member
    if member.name not in names._member_names_:
        names._member_names_.append(member.name)
    _enter(member, backend)
    return backend.served


def unregister() -> None:
    """Take the backend away again. Models that were set to it need ``model.reset_attention_backend()``."""
    dispatch = _dispatch()
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    member = names._value2member_map_.pop(NAME, None)
    if member is None:
        return
    _leave(member)
    names._member_map_.pop(member.name)
    names._member_names_.remove(member.name)
    if registry._active_backend is member:
        registry.set_active_backend(names(dispatch.DIFFUSERS_ATTN_BACKEND))


def swap(
    model: nn.Module,
    method: MethodSpec | Plan | None = None,
    *,
    dense_steps: int = 0,
    dense_layers: Iterable[int | str] = (),
    min_length: int | None = None,
    exact_rows: int = 0,
    cross: bool | None = None,
) -> Swapped:
    """Let a method, or a plan's methods, answer for the attention layers of one model.

    Args:
        model: a diffusers model (``pipe.transformer``); where it is compiled as a whole, the compiled one
        method: None: the plan that came with the model, in its config or its folder (see ``Plan``), or else "auto"
        dense_steps: the first denoising steps of every run stay exact. A step is a lower ``timestep``
        dense_layers: layers that stay exact: by name, or by position among the self-attention layers (-1 is the last)
        min_length: shorter calls stay exact; None: as the plan says, or 4096
        exact_rows: conditioning rows that stay exact, see ``register``; joint models are recognised
        cross: serve cross-attention too, see ``register``; None: as the plan says, or not

    The report says what happened to each layer, its ``served`` how many calls were answered how. Swapping again
    replaces the first swap, ``restore`` undoes it; so does ``model.set_attention_backend``, except for the counting
    of steps.
    """
    inner = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    found = _layers(inner)
    chosen = choose(method, inner, HOST, list(found), min_length, (METHOD, MIN_LENGTH))
    cross = chosen.planned if cross is None else cross  # a plan that names a layer for cross-attention means it
    dense = _dense(dense_layers, found)
    steps = _steps(inner, dense_steps)
    served = CallCounts()
    rows, choices = [], {}
    for name, layer in found.items():
        reason = "a dense layer" if name in dense else chosen.why_exact(name, _is_cross(name, layer))
        reason = reason or ("cross-attention" if _is_cross(name, layer) and not cross else "")
        choices[name] = Exact() if reason else chosen.layers[name]
        rows.append(LayerRow(name, text(choices[name]), reason))
    backends = {
        each: _backend(each, chosen.exact_below, exact_rows, _is_joint(inner, found), cross, steps, served)
        for each in dict.fromkeys(choices.values())
    }

    restore(model)  # from here on nothing can fail
    undo: list[Callable[[], object]] = []
    members = {each: _member(f"{NAME}_{next(_fresh)}") for each in backends}
    for each, member in members.items():
        _enter(member, backends[each])
        undo.append(partial(_leave, member))
    for name, layer in found.items():
        processor = layer.processor
        undo.append(partial(setattr, processor, "_attention_backend", processor._attention_backend))
        processor._attention_backend = members[choices[name]]
    if steps is not None:
        undo.append(model.register_forward_pre_hook(partial(_see, steps), with_kwargs=True).remove)
    setattr(inner, SWAPPED, undo)
    return Swapped(tuple(rows), chosen.exact_below, served)


def restore(model: nn.Module) -> None:
    """Undo ``swap``. Does nothing to a model that was not swapped.

    Args:
        model: what was swapped
    """
    for undo in vars(getattr(model, "_orig_mod", model)).pop(SWAPPED, []):
        undo()


# ---------------------------------------------------------------------------------------------------- layers


def _layers(model: nn.Module) -> dict[str, Any]:
    """Every attention module that asks diffusers' dispatcher, by its name, in order."""
    if not isinstance(model, nn.Module):
        raise bad_type("a diffusers model", type(model).__name__, "pipe.transformer")
    found = {
        name: module
        for name, module in model.named_modules()
        if hasattr(getattr(module, "processor", None), "_attention_backend")
    }
    if not found:
        wanted = "a model whose attention goes through diffusers' dispatcher"
        raise bad_value(wanted, f"{type(model).__name__}, where no layer does", "the transformer of a pipeline")
    return found


def _is_cross(name: str, layer: Any) -> bool:
    """As the layer says, or else by its name: attn1 is usually self-attention and attn2 the other."""
    return bool(getattr(layer, "is_cross_attention", name.endswith("attn2") or "cross" in name))


def _is_joint(model: nn.Module, found: dict[str, Any]) -> bool:
    """Does context parallelism share out the conditioning as a stream of its own, which then joins self-attention?"""
    inputs = (getattr(model, "_cp_plan", None) or {}).values()
    apart = any({"hidden_states", "encoder_hidden_states"} <= set(each) for each in inputs if isinstance(each, dict))
    return apart and not any(_is_cross(name, layer) for name, layer in found.items())


def _dense(given: Iterable[int | str], found: dict[str, Any]) -> set[str]:
    alone = [name for name, layer in found.items() if not _is_cross(name, layer)]
    dense = set()
    for each in given:
        if isinstance(each, int) and -len(alone) <= each < len(alone):
            dense.add(alone[each])
        elif each in found:
            dense.add(str(each))
        else:
            wanted = f"dense_layers by name ({alone[0]}, ...) or position below {len(alone)}"
            raise bad_value(wanted, repr(each), f"dense_layers=[0, {alone[-1]!r}]")
    return dense


# ---------------------------------------------------------------------------------------------------- steps


def _steps(model: nn.Module, dense: int) -> Steps | None:
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise bad_value("dense_steps a whole number >= 0", repr(dense), "dense_steps=5")
    if dense and "timestep" not in inspect.signature(model.forward).parameters:
        got = f"{type(model).__name__}, whose forward takes no timestep"
        raise bad_value("a model that is told its timestep, to count steps", got, "dense_steps=0")
    return Steps(dense) if dense else None


def _see(steps: Steps, model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    inner: Any = getattr(model, "_orig_mod", model)
    steps.see(inspect.signature(inner.forward).bind_partial(*given, **named).arguments["timestep"])


# ---------------------------------------------------------------------------------------------------- the registry


def _backend(
    method: LayerPlan,
    min_length: int,
    exact_rows: int,
    joint: bool,
    cross: bool,
    steps: Steps | None,
    served: CallCounts,
) -> DiffusersBackend:
    check_exact_below(min_length)
    if isinstance(exact_rows, bool) or not isinstance(exact_rows, int):
        raise bad_value("exact_rows a whole number, negative for the last rows", repr(exact_rows), "exact_rows=512")
    return DiffusersBackend(method, min_length, exact_rows, joint, cross, NAME, steps, served)


def _dispatch() -> Any:
    return need("diffusers", "diffusers.models.attention_dispatch", "0.42")


def _member(value: str) -> Any:
    """A name among diffusers' backends. Its Enum is closed to subclasses, not to members."""
    names = _dispatch().AttentionBackendName
    member = str.__new__(names, value)
    member._name_, member._value_ = value.upper(), value
    return member


def _enter(member: Any, backend: DiffusersBackend) -> None:
    dispatch = _dispatch()
    dispatch._AttentionBackendRegistry.register(
        member, constraints=[dispatch._check_device, dispatch._check_shape], supports_context_parallel=True
    )(backend)


def _leave(member: Any) -> None:
    registry = _dispatch()._AttentionBackendRegistry
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        table.pop(member, None)
    registry._supports_context_parallel.discard(member.value)
