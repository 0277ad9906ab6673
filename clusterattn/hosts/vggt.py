"""VGGT and its kin: the blocks in which all frames attend to all frames; attention inside a frame stays exact.

    print(ca.hosts.vggt.swap(model))                              # VGGT: model.aggregator.global_blocks
    print(ca.hosts.vggt.swap(model, blocks=model.decoder[1::2]))  # π³, whose blocks alternate in one list

Nothing of the host is imported: what is looked for is its kind of attention module, with ``qkv``, norms of q and k,
``rope`` and ``proj``, which vision transformers share (timm's with ``blocks=model.blocks``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from .._errors import bad_type, bad_value
from .._layer_call import LayerCall
from .._plan import LayerPlan, Plan, choose
from .._report import LayerRow, log_once, text
from .._types import Method
from ..methods import Exact, MethodSpec
from ..methods.budgets import Shape
from ._served import CallCounts, Swapped, chosen

__all__ = ["restore", "swap"]

HOST = "vggt"  # in plans
METHOD: MethodSpec = "auto"
EXACT_BELOW = 4096
PARTS = {"qkv", "q_norm", "k_norm", "rope", "attn_drop", "norm", "proj", "proj_drop"}  # what such a module is made of
POSITIONS = ("pos", "xpos")  # the hosts' words for what rope is given


@dataclass(frozen=True)
class BlockStamp:
    """A block's settings, kept on its attention module."""

    name: str
    method: LayerPlan
    exact_below: int
    served: CallCounts


class GlobalAttention(nn.Module):
    """Comes before the host's class among the bases of a swapped module: a method in SDPA's place. Everything else, the
    weights and their names too, is the host's."""

    _clusterattn: BlockStamp

    def forward(self, x: Tensor, *given: Any, **named: Any) -> Tensor:
        """x (b n heads·d), and what else the host passes: positions for rope."""
        stamp, host = self._clusterattn, cast(Any, self)
        method, reason = stamp.method, self._why_exact(x, given, named)
        if not reason and isinstance(method, Method):
            (b, n, width), h = x.shape, host.num_heads
            method, reason = chosen(method, Shape(n, n, width // h, width // h), b * h, x.device, x.dtype)
        stamp.served.note("exact" if reason else text(method), reason)
        if reason:
            plain: Tensor = super().forward(x, *given, **named)
            return plain
        b, n, width = x.shape
        q, k, v = host.qkv(x).view(b, n, 3, host.num_heads, -1).permute(2, 0, 3, 1, 4)
        if hasattr(host, "q_norm"):
            q, k = host.q_norm(q).to(v.dtype), host.k_norm(k).to(v.dtype)
        if self._turns():
            at = next(named[word] for word in POSITIONS if named.get(word) is not None)
            q, k = host.rope(q, at), host.rope(k, at)
        out = LayerCall(q, k, v.contiguous(), None, None, False, host.scale, method).answer()
        answer: Tensor = host.proj_drop(host.proj(out.transpose(1, 2).reshape(b, n, width)))
        return answer

    def _turns(self) -> bool:
        return getattr(self, "rope", None) is not None

    def _why_exact(self, x: Tensor, given: tuple[Any, ...], named: dict[str, Any]) -> str:
        """ "" where the method serves the call. A short one needs no word, an obstacle is said once."""
        stamp = self._clusterattn
        if x.shape[1] < stamp.exact_below:
            return f"shorter than {stamp.exact_below} tokens"
        more = [value for word, value in named.items() if word not in POSITIONS]
        reason = ""
        if given or any(value is not None and value is not False for value in more):
            reason = "it is given more than positions"
        elif self._turns() and all(named.get(word) is None for word in POSITIONS):
            reason = "rope is given no positions"
        elif self.training and getattr(getattr(self, "attn_drop", None), "p", 0.0) > 0.0:
            reason = "attention dropout needs the weights: set it to 0, or call eval()"
        if reason:
            log_once(stamp.name, reason)
        return reason


def swap(
    model: nn.Module,
    method: MethodSpec | Plan | None = None,
    *,
    exact_below: int | None = None,
    blocks: Iterable[nn.Module] | None = None,
) -> Swapped:
    """Let a method, or a plan's methods, answer in the global blocks. Weights and state dict stay.

    Args:
        model: a model with such blocks
        method: None: the plan that came with the model, in its config or its folder (see ``Plan``), or else "auto":
            Refined where it is faster on this device, the host's attention elsewhere
        exact_below: fewer tokens (of all frames together) stay exact; None: as the plan says, or 4096
        blocks: the blocks that attend globally, each with an ``attn``; None: those in lists named ``global_blocks``

    The report says what happened to each block, its ``served`` how many calls were answered how. Swapping again
    replaces the first swap, ``restore`` undoes it.
    """
    if not isinstance(model, nn.Module):
        raise bad_type("a model (torch.nn.Module)", type(model).__name__, "VGGT.from_pretrained(...)")
    found = _found(model, None if blocks is None else list(blocks))
    wanted = choose(method, model, HOST, list(found), exact_below, (METHOD, EXACT_BELOW))
    below = wanted.exact_below
    served, rows, stamps = CallCounts(), [], {}
    for name, attn in found.items():
        given = wanted.layers.get(name, Exact())
        reason = wanted.why_exact(name, cross=False) or _why_plain(attn, given)
        rows.append(LayerRow(name, "exact" if reason else text(given), reason))
        if not reason:
            stamps[name] = BlockStamp(name, given, below, served)
    restore(model)  # from here on nothing can fail
    for name, stamp in stamps.items():
        host = type(found[name])
        found[name].__class__ = type(f"Global{host.__name__}", (GlobalAttention, host), {})
        found[name]._clusterattn = stamp
    return Swapped(tuple(rows), below, served)


def restore(model: nn.Module) -> None:
    """Undo ``swap``. Does nothing to a model that was not swapped.

    Args:
        model: what was swapped
    """
    for module in model.modules():
        if isinstance(module, GlobalAttention):
            del module._clusterattn
            module.__class__ = type(module).__bases__[1]


def _found(model: nn.Module, blocks: list[nn.Module] | None) -> dict[str, Any]:
    """The attention modules of the global blocks, by their names."""
    chosen = None if blocks is None else {id(block) for block in blocks}
    found = {}
    for name, block in model.named_modules():
        mine = name.rpartition(".")[0].endswith("global_blocks") if chosen is None else id(block) in chosen
        if mine and isinstance(getattr(block, "attn", None), nn.Module):
            found[f"{name}.attn"] = block.attn
    if not found:
        got = f"{type(model).__name__}, where there are none"
        raise bad_value("a model with global_blocks that have an attn", got, "blocks=: those that attend globally")
    return found


def _why_plain(plain: nn.Module, method: LayerPlan) -> str:
    """What keeps the host's module in its place; "" if nothing does."""
    missing = [part for part in ("qkv", "proj", "proj_drop") if not isinstance(getattr(plain, part, None), nn.Module)]
    missing += [word for word in ("num_heads", "scale") if not hasattr(plain, word)]
    if missing:
        return f"it has no {missing[0]}"
    for part, module in [*plain.named_children(), *plain.named_parameters(recurse=False)]:
        if part not in PARTS or (part == "norm" and not isinstance(module, nn.Identity)):
            return f"it does more than attend: {part}"
    heads = int(getattr(plain, "num_heads", 0))
    if not isinstance(method, Method) and len(method) != heads:
        raise bad_value(f"a method for each of {heads} heads", f"{len(method)}", "one for all heads")
    return ""
