"""Multi-head attention by any method, in the place of ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .._attention import attention
from .._errors import bad_type, bad_value, check_whole
from .._plan import check_exact_below, check_stateless
from .._report import log_once
from .._types import Method
from ..methods import Exact, MethodSpec, Routing
from ..methods import method as as_method
from . import masks, weights
from .memory import RoutingMemory

WORDS = {  # torch's, SDPA's, and what they are here
    "num_heads": "heads=",
    "is_causal": "causal=True here for every call, or is_causal=True in a call",
    "enable_gqa": "kv_heads=: how many key heads there are",
    "add_bias_kv": "leaving it out: no keys are added here",
    "add_zero_attn": "leaving it out: no keys are added here",
    "dropout_p": "dropout=, which is on the output",
}


class _NotForFastPaths:
    """Stands where torch's fast paths look for a weight, and says that plain kernels must not touch it."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented


class MultiheadAttention(nn.Module):
    """``nn.MultiheadAttention`` by clustering, also as ``self_attn`` of torch's transformer layers.

    Args:
        embed_dim: features of the queries, and of the output
        heads: query heads; they divide embed_dim
        method: a method, its name, or "name:key=value,..."
        kv_heads: fewer key and value heads than query heads, each serving a group of them
        kdim: features of the keys that come in, where they are not embed_dim
        vdim: features of the values that come in, where they are not embed_dim
        batch_first: (b n embed_dim), the default, or (n b embed_dim)
        shared_qk: one projection for queries and keys (always with Reformer, which has no keys of its own)
        dropout: on the OUTPUT, after out_proj: clustering never holds the weights that torch drops
        bias: in the projections
        causal: attend causally in every call
        seed: of the method's draws, the same in every call: one input, one answer, also when activation checkpointing
            asks twice. Set ``.seed`` between steps for fresh draws; a tensor that holds it makes them fresh in the
            replays of a CUDA graph
        exact_below: shorter sequences (of queries or of keys) are answered exactly
        exact_if_needed: so are calls that the method cannot honour, with one sentence in the log; else they are refused
        parallel: a process group or a DeviceMesh of one dimension: what comes in is this rank's share of the sequence,
            and attention is over the tokens of all ranks (``ca.parallel.attention``). Nothing falls back to exact
            attention then: it would see the share alone
        device: where the weights are made
        dtype: of the weights
        **torchs: torch's words are answered with ours, in an error

    ``load_state_dict`` also reads what ``nn.MultiheadAttention`` saved; ``from_torch`` and ``to_torch`` copy modules.

    With Routing the module owns the centroids (a buffer, moved in training mode only) and leaves the
    commitment loss of its last training forward in ``auxiliary_loss`` (None with other methods); 1e-4 is
    the published weight for it. ClusterFormer starts from the data in every call here; its trained centroids and losses
    belong to ``ClusterFormerEncoder``, and ``forward`` refuses settings that act through them alone.
    """

    # torch's transformer layers and encoders look at these before they take a fast path that would skip
    # our forward. The weight is asked for when self_attn is replaced inside a finished nn.TransformerEncoder.
    in_proj_bias: ClassVar[None] = None
    in_proj_weight: ClassVar[_NotForFastPaths] = _NotForFastPaths()
    _qkv_same_embed_dim: ClassVar[bool] = False

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        method: MethodSpec = "refined",
        *,
        kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        shared_qk: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        causal: bool = False,
        seed: int | Tensor = 0,
        exact_below: int = 0,
        exact_if_needed: bool = False,
        parallel: ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **torchs: Any,
    ) -> None:
        super().__init__()
        for word in torchs:
            raise bad_type("our words for MultiheadAttention", f"{word}=", WORDS.get(word, "one of its arguments"))
        check_exact_below(exact_below)
        self.exact_below, self.exact_if_needed, self.parallel = exact_below, exact_if_needed, parallel
        if parallel is not None and exact_below:
            raise bad_value(
                "exact_below=0 over many ranks, which attend exactly to nothing but their own share",
                f"exact_below={exact_below}",
                "leaving it out",
            )
        kv_heads = heads if kv_heads is None else kv_heads
        check_whole("MultiheadAttention", embed_dim=embed_dim, heads=heads, kv_heads=kv_heads)
        if embed_dim % heads or heads % kv_heads:
            got = f"embed_dim={embed_dim}, heads={heads}, kv_heads={kv_heads}"
            advice = f"embed_dim={heads * -(-embed_dim // heads)}"
            raise bad_value("kv_heads that divide heads that divide embed_dim", got, advice)
        self.method = as_method(method)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, heads, embed_dim // heads
        self.batch_first, self.causal, self.seed = batch_first, causal, seed
        self.shared_qk = shared_qk = shared_qk or self.method.shared_qk
        if shared_qk and (kv_heads != heads or kdim not in (None, embed_dim)):
            got, advice = (
                f"kv_heads={kv_heads}, kdim={kdim}",
                "leaving them out, or shared_qk=False, not Reformer",
            )
            raise bad_value("keys shaped like queries, to share a projection", got, advice)
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, **options)
        self.k_proj = None if shared_qk else nn.Linear(kdim or embed_dim, kv_heads * self.head_dim, **options)
        self.v_proj = nn.Linear(vdim or embed_dim, kv_heads * self.head_dim, **options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **options)
        self.dropout = nn.Dropout(dropout)
        routing = isinstance(self.method, Routing)
        self.memory = RoutingMemory(heads, self.head_dim, device) if routing else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, as torch does."""
        for projection in filter(None, (self.q_proj, self.k_proj, self.v_proj)):
            nn.init.xavier_uniform_(projection.weight, gain=2**-0.5)  # as torch, which stacks the three
        for projection in filter(None, (self.q_proj, self.k_proj, self.v_proj, self.out_proj)):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    @classmethod
    def from_torch(
        cls, trained: nn.MultiheadAttention, method: MethodSpec = "refined", **options: Any
    ) -> MultiheadAttention:
        """A copy of a trained ``nn.MultiheadAttention``. Its dropout moves from the weights to the output.

        Args:
            trained: torch's module
            method: a method, its name, or "name:key=value,..."
            **options: further ones of this class
        """
        if trained.bias_k is not None or trained.add_zero_attn:
            raise bad_value("no extra keys", "add_bias_kv or add_zero_attn", "training without them")
        weight, bias = trained.out_proj.weight, trained.in_proj_bias is not None
        same: dict[str, Any] = {"bias": bias, "device": weight.device, "dtype": weight.dtype}
        same |= {name: getattr(trained, name) for name in ("kdim", "vdim", "batch_first", "dropout")}
        ours = cls(trained.embed_dim, trained.num_heads, method, **(same | options))
        if ours.k_proj is None:
            raise bad_value("room for the key projection", f"{ours.method}, shared_qk", "another method than Reformer")
        ours.load_state_dict(trained.state_dict(), strict=ours.memory is None)  # torch has no centroids
        return ours.train(trained.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """A copy as ``nn.MultiheadAttention``, which answers exactly. Its dropout moves back to the weights."""
        return weights.to_torch(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        weights.renamed(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def auxiliary_loss(self) -> Tensor | None:
        """Routing's commitment loss of the last training forward; None with other methods."""
        return None if self.memory is None else self.memory.auxiliary_loss

    def take_auxiliary_loss(self) -> Tensor | None:
        """The loss, which is then forgotten. As long as it is kept, so is the whole graph of its forward: memory that
        the next step could use, and nodes that a recording as a CUDA graph must not meet."""
        loss = self.auxiliary_loss
        if self.memory is not None:
            self.memory.auxiliary_loss = None
        return loss

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """In torch's conventions: masks say True (or -inf) = masked OUT, unlike ``ca.attention``.

        Args:
            query: (b n embed_dim); (n b embed_dim) with batch_first=False; or one sequence without b
            key: (b m kdim), or in the order of query; the same tensor as query in self-attention
            value: (b m vdim), or in the order of query
            key_padding_mask: (b m). Where query is key, padding takes no part as queries either: its rows are
                out_proj's answer to 0
            need_weights: also return the dense weights that the method really applied: (b n m), or (b heads n m) with
                average_attn_weights=False. Not by default: never making them is the point
            attn_mask: the causal mask, together with is_causal=True; any other with Exact alone
            average_attn_weights: weights averaged over heads, as torch has it
            is_causal: attend causally in this call
            query_padding_mask: (b n): the same for cross-attention
        """
        if query.is_nested:
            raise bad_value("padded tensors and masks", "a nested tensor", "query.to_padded_tensor(0.0)")
        check_stateless(self.method)  # a layer that keeps the state calls ``attend``
        alone, self_attention = query.dim() == 2, query is key
        tokens = 0 if alone or not self.batch_first else 1
        short = min(query.shape[tokens], key.shape[tokens]) < self.exact_below
        method = Exact() if short else self._able(self_attention, attn_mask, is_causal or self.causal)
        if method.self_only and not self_attention:
            wanted = f"one tensor as query and key: {type(method).__name__} is self-attention only"
            raise bad_value(wanted, "two tensors", "Refined, Improved, Clustered or Smyrf across sequences")
        if self_attention and query_padding_mask is None:
            query_padding_mask = key_padding_mask

        def batched(x: Tensor) -> Tensor:
            return x.unsqueeze(0) if alone else x if self.batch_first else x.transpose(0, 1)

        def kept(name: str, padding: Tensor | None) -> Tensor | None:
            return None if padding is None else masks.kept(padding.unsqueeze(0) if alone else padding, name)

        q, v = batched(query), batched(value)
        k = q if self_attention else batched(key)
        options = {
            "key_mask": kept("key_padding_mask", key_padding_mask),
            "query_mask": kept("query_padding_mask", query_padding_mask),
        }
        causal = self.causal or is_causal
        if attn_mask is not None:
            shape = (q.shape[0], self.num_heads, q.shape[1], k.shape[1])
            options["attn_mask"], causal = masks.dense(attn_mask, method, shape, is_causal, self.causal)
        out, applied, _ = self.attend(q, k, v, method=method, need_weights=need_weights, causal=causal, **options)
        if applied is not None:
            applied = applied.mean(1) if average_attn_weights else applied
            applied = applied.squeeze(0) if alone else applied
        return out.squeeze(0) if alone else out if self.batch_first else out.transpose(0, 1), applied

    def _able(self, self_attention: bool, attn_mask: Tensor | None, causal: bool) -> Method:
        """The method, or Exact where it cannot honour a call and need not refuse it."""
        kind, reason = type(self.method).__name__, ""
        if self.method.self_only and not self_attention:
            reason = f"{kind} is self-attention only"
        elif attn_mask is not None and not causal:
            reason = "the mask says more than causality and padding"
        elif causal and self.method.causality == "no":
            reason = f"{kind} cannot be causal"
        if not reason or not self.exact_if_needed or self.parallel is not None:
            return self.method
        log_once("MultiheadAttention", reason)
        return Exact()

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        method: Method | None = None,
        need_weights: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Batch first, with the options of ``ca.attention`` (masks: True = kept): answer, weights, state.

        Args:
            query: (b n embed_dim)
            key: (b m kdim)
            value: (b m vdim)
            method: another one than the module's, for this call
            need_weights: also the dense weights (b heads n m)
            **options: of ``ca.attention``
        """
        method = self.method if method is None else method
        q, v = self._split(self.q_proj(query)), self._split(self.v_proj(value))
        if self.k_proj is not None:
            k = self._split(self.k_proj(key))
        else:
            k = q if query is key else self._split(self.q_proj(key))
        if need_weights:  # every method is linear in v: its answer to an identity is the weights of this call
            identity = torch.eye(v.shape[2], dtype=v.dtype, device=v.device)
            v = torch.cat([v, identity.expand(*v.shape[:2], -1, -1)], -1)
        memory = self.memory if isinstance(method, Routing) else None
        if memory is not None:
            options |= {"state": memory.recall(), "return_state": self.training}
        answer = self._answer(q, k, v, method, options)
        out, state = answer if options.get("return_state") else (answer, None)
        if memory is not None:
            memory.learn(state)
        applied = None
        if need_weights:
            out, applied = out[..., : self.head_dim], out[..., self.head_dim :]
        return self.dropout(self.out_proj(out.transpose(1, 2).flatten(2))), applied, state

    def _answer(self, q: Tensor, k: Tensor, v: Tensor, method: Method, options: dict[str, Any]) -> Any:
        if self.parallel is None:
            return attention(q, k, v, method=method, seed=self.seed, **options)
        from .. import parallel

        plain = {name: options.pop(name, None) for name in ("key_mask", "query_mask")}
        causal = bool(options.pop("causal", False))
        other = [name for name, given in options.items() if given is not None]
        if other or v.shape[-1] != self.head_dim:
            got = other[0] if other else "need_weights=True"
            raise bad_value("attention over many ranks with masks of padding alone", got, "parallel=None")
        seed = self.seed  # a tensor is refused there, in words
        return parallel.attention(q, k, v, method=method, group=self.parallel, causal=causal, seed=seed, **plain)

    def _split(self, x: Tensor) -> Tensor:
        """(b n heads·d) -> (b heads n d)"""
        b, n, width = x.shape
        return x.reshape(b, n, width // self.head_dim, self.head_dim).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, heads={self.num_heads}, method={self.method}"
