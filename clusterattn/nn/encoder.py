"""A transformer encoder: one method for every layer, or one for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._errors import bad_value, check_choice, check_whole
from .._plan import check_stateless
from ..methods import MethodSpec
from .attention import MultiheadAttention

Activation = str | Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


class Frame(nn.Module):
    """What every layer has around its attention: residuals, norms, the feed-forward part."""

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        method: MethodSpec = "refined",
        *,
        feedforward: int | None = None,
        dropout: float = 0.1,
        activation: Activation = "gelu",
        norm_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(activation, str):
            check_choice(type(self).__name__, "activation", activation, tuple(ACTIVATIONS))
            activation = ACTIVATIONS[activation]
        here: dict[str, Any] = {"device": device, "dtype": dtype}
        width = feedforward or 4 * embed_dim
        self.attention = MultiheadAttention(embed_dim, heads, method, dropout=dropout, **here, **options)
        self.linear1, self.linear2 = nn.Linear(embed_dim, width, **here), nn.Linear(width, embed_dim, **here)
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim, **here), nn.LayerNorm(embed_dim, **here)
        self.dropout, self.activation, self.norm_first = nn.Dropout(dropout), activation, norm_first

    def enter(self, x: Tensor) -> Tensor:
        """What attention sees of x.

        Args:
            x: hidden states (b n embed_dim)
        """
        return self.norm1(x) if self.norm_first else x

    def attend(self, x: Tensor, key_mask: Tensor | None, **options: Any) -> tuple[Tensor, Any]:
        """Self-attention in which padding is neither asked nor heard: the answer and the new state.

        Args:
            x: hidden states (b n embed_dim)
            key_mask: bool (b n), True = a real token
            **options: of ``MultiheadAttention.attend``
        """
        causal = self.attention.causal
        out, _, state = self.attention.attend(x, x, x, key_mask=key_mask, query_mask=key_mask, causal=causal, **options)
        return out, state

    def leave(self, x: Tensor, answer: Tensor) -> Tensor:
        """From x and the answer of attention to the layer's output.

        Args:
            x: what came into the layer
            answer: of attention
        """
        x = x + answer
        if self.norm_first:
            return x + self.feed(self.norm2(x))
        x = self.norm1(x)
        y: Tensor = self.norm2(x + self.feed(x))
        return y

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward part.

        Args:
            x: hidden states (b n embed_dim)
        """
        y: Tensor = self.dropout(self.linear2(self.dropout(self.activation(self.linear1(x)))))
        return y


class EncoderLayer(Frame):
    """Attention and feed-forward, each with dropout and a residual.

    Args:
        feedforward: width of the feed-forward part, 4 · embed_dim by default
        norm_first: norms before each part (the default), or after it as in the first transformer
        activation: "gelu", "relu" or a function
        embed_dim: width of the hidden states
        heads: query heads; they divide embed_dim
        method: a method, its name, or "name:key=value,..."
        dropout: on the answer of attention and in the feed-forward part
        device: where the weights are made
        dtype: of the weights
        options: of ``MultiheadAttention``: kv_heads, shared_qk, causal, bias, seed

    and the options of MultiheadAttention: kv_heads, shared_qk, causal, bias, seed. Settings of ClusterFormer's trained
    centroids and losses are refused: they are ``ClusterFormerEncoder``'s.
    """

    def __init__(self, embed_dim: int, heads: int, method: MethodSpec = "refined", **options: Any) -> None:
        super().__init__(embed_dim, heads, method, **options)
        check_stateless(self.attention.method)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """x (b n embed_dim); key_mask (b n) bool, True = a real token, as in ``ca.attention``.

        Args:
            x: hidden states (b n embed_dim)
            key_mask: bool (b n), True = a real token, as in ``ca.attention``
        """
        answer, _ = self.attend(self.enter(x), key_mask)
        return self.leave(x, answer)


class Encoder(nn.Module):
    """A stack of ``EncoderLayer``; takes their options.

    Args:
        embed_dim: width of the hidden states
        heads: query heads; they divide embed_dim
        layers: how many
        method: one for all layers, or a list with one for each
        norm_first: norms before each part (the default), or after it
        final_norm: a LayerNorm after the last layer; by default where layers put their norms first
        seed: of the first layer's draws; each layer has its own
        **options: of ``EncoderLayer``
    """

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        layers: int,
        method: MethodSpec | list[MethodSpec] = "refined",
        *,
        norm_first: bool = True,
        final_norm: bool | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        check_whole("Encoder", layers=layers)
        methods = method if isinstance(method, list) else [method] * layers
        if len(methods) != layers:
            got = f"{len(methods)} methods"
            raise bad_value(f"one method, or one for each of {layers} layers", got, f"layers={len(methods)}")
        self.layers = nn.ModuleList(
            EncoderLayer(embed_dim, heads, each, norm_first=norm_first, seed=seed + at, **options)  # draws of its own
            for at, each in enumerate(methods)
        )
        self.norm = last_norm(embed_dim, norm_first if final_norm is None else final_norm, options)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """x (b n embed_dim); key_mask (b n) bool, True = a real token, as in ``ca.attention``.

        Args:
            x: hidden states (b n embed_dim)
            key_mask: bool (b n), True = a real token, as in ``ca.attention``
        """
        for layer in self.layers:
            x = layer(x, key_mask)
        y: Tensor = self.norm(x)
        return y

    @property
    def auxiliary_loss(self) -> Tensor | None:
        """The sum of what Routing layers left in their last training forward; None where there is none."""
        return _sum([each.auxiliary_loss for each in self._attentions()])

    def take_auxiliary_loss(self) -> Tensor | None:
        """The same, forgotten as it is handed out (see MultiheadAttention)."""
        return _sum([each.take_auxiliary_loss() for each in self._attentions()])

    def _attentions(self) -> list[MultiheadAttention]:
        return [layer.attention for layer in self.layers if isinstance(layer, EncoderLayer)]


def _sum(losses: list[Tensor | None]) -> Tensor | None:
    there = [each for each in losses if each is not None]
    return torch.stack(there).sum() if there else None


def last_norm(embed_dim: int, wanted: bool, options: dict[str, Any]) -> nn.Module:
    """The norm after a stack, made where its layers are."""
    here = {name: options.get(name) for name in ("device", "dtype")}
    return nn.LayerNorm(embed_dim, **here) if wanted else nn.Identity()  # type: ignore[arg-type]
