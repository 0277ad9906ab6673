"""Swap every ``nn.MultiheadAttention`` of a module for attention by clustering, and put torch's back."""

from __future__ import annotations

import re

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .._errors import bad_type, bad_value
from .._plan import LayerPlan, Plan, choose
from .._report import LayerRow, Report, text
from .._types import Method
from ..methods import Exact, MethodSpec
from .attention import MultiheadAttention

HOST = "torch"  # in plans
CROSS = re.compile(r"multihead_attn$|cross|enc_?dec|encoder_attn", re.IGNORECASE)  # the first is torch's decoder layer


def swap(
    module: nn.Module,
    method: MethodSpec | Plan,
    *,
    exact_below: int | None = None,
    parallel: ProcessGroup | DeviceMesh | None = None,
) -> Report:
    """Put ``ca.nn.MultiheadAttention`` with the same weights wherever ``nn.MultiheadAttention`` stands in a module.

    Args:
        module: anything with ``nn.MultiheadAttention`` inside
        method: one for all, or a plan that names layers as ``module.named_modules()`` does; others stay torch's
        exact_below: shorter sequences (of queries or of keys) stay exact; None: as the plan says, or 0
        parallel: a process group or a DeviceMesh of one dimension whose ranks each hold a share of the sequence:
            attention goes over all of it (``ca.parallel``), and a layer that cannot is refused

    The weights are copied: swap before an optimizer takes hold of them. Checkpoints of the unswapped module still load.
    Calls that a method cannot honour (other masks than causal and padding ones) are answered exactly, and said once in
    the log. Dropout moves from the weights to the output. Swapping again replaces the first swap, ``restore`` puts
    torch's modules back, with the weights of now.
    """
    if not isinstance(module, nn.Module):
        raise bad_type("a module (torch.nn.Module)", type(module).__name__, "nn.TransformerEncoder(...)")
    if isinstance(module, (nn.MultiheadAttention, MultiheadAttention)):
        advice = "ca.nn.MultiheadAttention.from_torch(module, method)"
        raise bad_value("a module with attention inside it", type(module).__name__, advice)
    places = {name: each for name, each in _places(module).items() if _ours(each) or _torchs(each)}
    if not places:
        got = f"{type(module).__name__} without one"
        raise bad_value("a module with nn.MultiheadAttention in it", got, "ca.hf.swap for models of transformers")
    chosen = choose(method, module, HOST, list(places), exact_below)
    below = chosen.exact_below
    made: dict[int, nn.Module] = {}  # one that stands in several places stays one
    rows = []
    for name, old in places.items():
        given = chosen.layers.get(name, Exact())
        cross = bool(CROSS.search(name))
        reason = chosen.why_exact(name, cross) or _why_not(name, old, given, cross)
        if reason and parallel is not None:
            raise bad_value("layers that can all attend over many ranks", f"{name}: {reason}", "parallel=None")
        rows.append(LayerRow(name, "exact" if reason else text(given), reason))
        made.setdefault(id(old), _plain(old) if reason else _swapped(old, given, below, parallel))
    for name, old in places.items():  # from here on nothing can fail
        module.set_submodule(name, made[id(old)])
    return Report(tuple(rows), below)


def restore(module: nn.Module) -> None:
    """Undo ``swap``: torch's modules again, with the weights of now. Does nothing to a module that was not swapped.

    Args:
        module: what was swapped
    """
    made = {id(each): _plain(each) for each in _places(module).values() if _ours(each)}
    for name, old in _places(module).items():
        if id(old) in made:
            module.set_submodule(name, made[id(old)])


def _places(module: nn.Module) -> dict[str, nn.Module]:
    return {name: each for name, each in module.named_modules(remove_duplicate=False) if name}


def _torchs(each: nn.Module) -> bool:
    return isinstance(each, nn.MultiheadAttention)


def _ours(each: nn.Module) -> bool:
    """One that a swap put in place."""
    return isinstance(each, MultiheadAttention) and each.exact_if_needed


def _plain(each: nn.Module) -> nn.Module:
    return each.to_torch() if isinstance(each, MultiheadAttention) else each


def _swapped(
    old: nn.Module, method: LayerPlan, exact_below: int, parallel: ProcessGroup | DeviceMesh | None
) -> nn.Module:
    assert isinstance(method, Method)
    plain = _plain(old)
    assert isinstance(plain, nn.MultiheadAttention)
    return MultiheadAttention.from_torch(
        plain, method, exact_below=exact_below, exact_if_needed=True, parallel=parallel
    )


def _why_not(name: str, old: nn.Module, method: LayerPlan, cross: bool) -> str:
    """What keeps torch's own module in its place; "" if nothing does."""
    if not isinstance(method, Method):
        raise bad_value(f"one method for all heads of {name}", f"{len(method)}", "a plan made with heads=False")
    if isinstance(old, nn.MultiheadAttention):
        if type(old) is not nn.MultiheadAttention:
            return f"{type(old).__name__} is a class of its own"
        if old.bias_k is not None or old.add_zero_attn:
            return "it adds keys of its own (add_bias_kv, add_zero_attn)"
    if method.shared_qk:
        return f"{type(method).__name__} has no room for a projection of keys"
    return f"{type(method).__name__} is self-attention only" if cross and method.self_only else ""
