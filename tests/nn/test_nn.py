"""The modules: torch's own attention where the method is Exact, any method in torch's layers, state."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import Case, close, over, same_bits
from small_layers import DIM, HEADS, SMALL, B, N, causal_mask, grads, padding, tokens
from torch import Tensor, nn

import clusterattn as ca
from clusterattn.nn import ClusterFormerEncoder, Encoder, EncoderLayer, MultiheadAttention


@pytest.fixture(autouse=True)
def fixed_weights() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


# ---- beside nn.MultiheadAttention --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": False}, {"kdim": 6, "vdim": 9}])
@pytest.mark.parametrize("average", [True, False])
def test_exact_is_torchs_own(options: dict[str, Any], average: bool) -> None:
    theirs = nn.MultiheadAttention(DIM, HEADS, **{"batch_first": True, **options}, dtype=torch.float64)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)  # biases too
    ours = MultiheadAttention.from_torch(theirs, "exact")
    x, memory = tokens(dtype=torch.float64), tokens(2, n=9, dtype=torch.float64)
    came = [x, memory[..., : theirs.kdim], memory[..., : theirs.vdim]]
    came = [(each if theirs.batch_first else each.transpose(0, 1)).requires_grad_() for each in came]
    given = {"key_padding_mask": padding(9), "average_attn_weights": average}
    wanted, got = theirs(*came, **given), ours(*came, **given, need_weights=True)
    close(got, wanted)
    back, forth = (torch.autograd.grad(out.sin().sum(), came) for out, _ in (got, wanted))
    close(back, forth)
    out, weights = ours(*came, **given)
    assert weights is None  # not made unless asked for
    close(out, wanted[0])


def test_self_attention_with_padding_and_masks_of_torch() -> None:
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    ours = MultiheadAttention.from_torch(theirs, "exact")
    x, pad, hidden = tokens(), padding(), causal_mask()
    dense = torch.rand(B * HEADS, N, N) > 0.7
    dense[:, :, 0] = False
    cases: list[dict[str, Any]] = [
        {"key_padding_mask": pad},
        {"key_padding_mask": torch.zeros(B, N).masked_fill(pad, float("-inf"))},
        {"attn_mask": hidden, "is_causal": True},
        {"attn_mask": hidden.isinf(), "is_causal": True, "key_padding_mask": pad},
        {"attn_mask": dense},
        {"attn_mask": torch.randn(N, N)},
    ]
    for given in cases:
        wanted, got = theirs(x, x, x, **given)[0], ours(x, x, x, **given)[0]
        rows = ~pad if "key_padding_mask" in given else torch.ones_like(pad)
        close(got[rows], wanted[rows])
    alone, rows = x[1], ~pad[1]  # one sequence, without b
    given = {"key_padding_mask": pad[1], "need_weights": True}
    close(*([part[rows] for part in module(alone, alone, alone, **given)] for module in (ours, theirs)))


@over()
def test_every_method_serves_and_trains(case: Case) -> None:
    ours = MultiheadAttention(DIM, HEADS, case.method, dtype=torch.float64)
    x, pad = tokens(dtype=torch.float64), padding()
    out, weights = ours(x, x, x, key_padding_mask=pad, need_weights=True, average_attn_weights=False)
    assert weights.shape == (B, HEADS, N, N)
    close(weights.sum(-1), (~pad).unsqueeze(1).expand(-1, HEADS, -1).double())
    value = ours.v_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    close(out, ours.out_proj((weights @ value).transpose(1, 2).flatten(2)))  # the weights it really applied
    assert not weights.mT[pad.unsqueeze(1).expand(-1, HEADS, -1)].any()
    found = grads(out.sin().sum(), ours)
    assert found.keys() == dict(ours.named_parameters()).keys()  # nothing is left untrained
    assert all(grad.isfinite().all() for grad in found.values())


@over()
def test_padding_changes_nothing(case: Case) -> None:
    ours = MultiheadAttention(DIM, HEADS, case.method).eval()
    x, pad = tokens(), padding()
    y = torch.where(pad.unsqueeze(-1), 100.0, x)
    same_bits(ours(x, x, x, key_padding_mask=pad)[0], ours(y, y, y, key_padding_mask=pad)[0])


@over(where=lambda case: not case.method.self_only)
def test_cross_attention_is_the_plain_call(case: Case) -> None:
    options = {"kv_heads": 2, "kdim": 6, "vdim": 10, "seed": 5, "dtype": torch.float64}
    ours = MultiheadAttention(DIM, HEADS, case.method, **options).eval()
    x, memory = tokens(dtype=torch.float64), tokens(2, n=9, dtype=torch.float64)
    key, value, pad, gone = memory[..., :6], memory[..., :10], padding(9), padding()
    out, _ = ours(x, key, value, key_padding_mask=pad, query_padding_mask=gone)
    q, k, v = (
        projection(each).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
        for projection, each in ((ours.q_proj, x), (ours.k_proj, key), (ours.v_proj, value))
    )
    assert k.shape[1] == v.shape[1] == 2
    wanted = ca.attention(q, k, v, method=case.method, key_mask=~pad, query_mask=~gone, seed=5)
    close(out, ours.out_proj(wanted.transpose(1, 2).flatten(2)))


def test_shared_queries_and_keys() -> None:
    ours = MultiheadAttention(DIM, HEADS, "exact", shared_qk=True)
    twice = MultiheadAttention(DIM, HEADS, "exact")
    saved = ours.state_dict()
    assert not any(name.startswith("k_proj") for name in saved)
    twice.load_state_dict(saved | {f"k_proj.{what}": saved[f"q_proj.{what}"] for what in ("weight", "bias")})
    x, y = tokens(), tokens(2, n=9)
    close(ours(x, x, x)[0], twice(x, x, x)[0])
    close(ours(x, y, y)[0], twice(x, y, y)[0])
    assert MultiheadAttention(DIM, HEADS, "reformer").shared_qk  # it has no keys of its own to train


def test_dropout_is_on_the_output() -> None:
    ours = MultiheadAttention(DIM, HEADS, SMALL["refined"], dropout=0.5)
    x = tokens()
    dropped, kept = ours(x, x, x)[0], ours.eval()(x, x, x)[0]
    gone = dropped == 0
    assert 0.3 < float(gone.float().mean()) < 0.7
    close(dropped[~gone], 2 * kept[~gone])


def test_causal_attention_does_not_see_the_future() -> None:
    later = tokens().clone()
    later[:, -1] += 3.0
    for method in (ca.Exact(), ca.Refined(clusters=2, top=2, block=4)):
        always = MultiheadAttention(DIM, HEADS, method, causal=True)
        asked = MultiheadAttention(DIM, HEADS, method)
        asked.load_state_dict(always.state_dict())
        before, after = (always(x, x, x)[0] for x in (tokens(), later))
        same_bits(before[:, :-1], after[:, :-1])
        x = tokens()
        for mask in (None, causal_mask(), causal_mask().expand(B * HEADS, N, N)):
            same_bits(before, asked(x, x, x, attn_mask=mask, is_causal=True)[0])
        same_bits(before, always(x, x, x, attn_mask=causal_mask())[0])


def test_what_clustering_cannot_honour_is_refused() -> None:
    x, y = tokens(), tokens(2)
    ours, copied = MultiheadAttention(DIM, HEADS, SMALL["refined"]), MultiheadAttention.from_torch
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("Exact", lambda: ours(x, x, x, attn_mask=torch.rand(N, N) > 0.5)),
        ("Exact", lambda: ours(x, x, x, attn_mask=causal_mask())),
        ("Exact", lambda: ours(x, x, x, attn_mask=causal_mask().T, is_causal=True)),
        ("attn_mask", lambda: ours(x, x, x, attn_mask=causal_mask()[1:], is_causal=True)),
        ("bool", lambda: ours(x, x, x, attn_mask=causal_mask().isinf().long(), is_causal=True)),
        ("Exact", lambda: ours(x, x, x, key_padding_mask=torch.randn(B, N))),
        ("bool", lambda: ours(x, x, x, key_padding_mask=padding().long())),
        ("key_mask", lambda: ours(x, x, x, key_padding_mask=padding()[:, 1:])),
        ("nested", lambda: ours(*[torch.nested.nested_tensor(list(x), layout=torch.jagged)] * 3)),
        ("self-attention only", lambda: MultiheadAttention(DIM, HEADS, "reformer")(x, y, y)),
        ("divide", lambda: MultiheadAttention(DIM, 4, kv_heads=3)),
        ("heads", lambda: MultiheadAttention(DIM, 0)),
        ("share", lambda: MultiheadAttention(DIM, HEADS, shared_qk=True, kv_heads=2)),
        ("a method", lambda: MultiheadAttention(DIM, HEADS, "no such")),
        ("extra keys", lambda: copied(nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True))),
        ("key projection", lambda: copied(nn.MultiheadAttention(DIM, HEADS), "reformer")),
        ("2 methods", lambda: Encoder(DIM, HEADS, 3, ["exact", "refined"])),
        ("activation", lambda: EncoderLayer(DIM, HEADS, activation="tanh")),
        ("mu", lambda: ClusterFormerEncoder(DIM, HEADS, 1, 3, mu=-1.0)),
    ]
    for word, call in refused:
        with pytest.raises((ValueError, TypeError), match=word):
            call()


# ---- inside torch's layers ---------------------------------------------------------------------------------


def counted(layer: nn.TransformerEncoderLayer, calls: list[Tensor]) -> None:
    """Count real calls of forward, without a hook: hooks alone switch torch's fast path off."""
    plain = layer.self_attn.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0])
        return plain(*args, **kwargs)

    layer.self_attn.forward = forward


@pytest.mark.parametrize("method", SMALL.values(), ids=str)
@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_layer_calls_us_in_training_and_in_eval(method: ca.Method, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 24, dropout=0.0, batch_first=True, norm_first=norm_first)
    exact = layer.eval()(tokens())
    layer.self_attn = MultiheadAttention(DIM, HEADS, method)
    counted(layer, calls := [])
    x, pad = tokens(), padding()
    layer.train()(x, src_key_padding_mask=pad).sum().backward()
    assert len(calls) == 1
    layer.eval()
    with torch.no_grad():
        quiet = layer(x, src_key_padding_mask=pad)
        layer(x)
    assert len(calls) == 3
    same_bits(quiet, layer(x, src_key_padding_mask=pad))  # with gradients wanted, the same answer
    assert not torch.equal(layer(x), exact)


@pytest.mark.parametrize("late", [True, False])
def test_torchs_encoder_calls_us_too(late: bool) -> None:
    """``late``: replaced inside a finished encoder, which has by then decided for nested tensors."""

    def swap(layer: nn.TransformerEncoderLayer) -> None:
        layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, SMALL["exact"])

    layer = nn.TransformerEncoderLayer(DIM, HEADS, 24, dropout=0.0, batch_first=True)
    wanted = nn.TransformerEncoder(layer, 2).eval()(tokens(), src_key_padding_mask=padding())
    layer = copy.deepcopy(layer)
    if not late:
        swap(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it will not use nested tensors
        encoder = nn.TransformerEncoder(layer, 2)
    calls: list[Tensor] = []
    for each in encoder.layers:
        if late:
            swap(each)
        counted(each, calls)
    x, pad = tokens(), padding()
    for training, grad in itertools.product((True, False), repeat=2):
        encoder.train(training)
        calls.clear()
        with torch.set_grad_enabled(grad):
            out, causal = encoder(x, src_key_padding_mask=pad), encoder(x, mask=causal_mask())
        assert [call.is_nested for call in calls] == [False] * 4
        close(out[~pad], wanted[~pad])
        close(causal[:, :4], encoder(x[:, :4], mask=causal_mask(4)))


def test_torchs_decoder_layer() -> None:
    layer = nn.TransformerDecoderLayer(DIM, HEADS, 24, dropout=0.0, batch_first=True).eval()
    x, memory = tokens(), tokens(2, n=9)
    given = {"tgt_mask": causal_mask(), "tgt_is_causal": True, "memory_key_padding_mask": padding(9)}
    wanted = layer(x, memory, **given)
    exact = ca.Refined(clusters=N, top=N)
    for name in ("self_attn", "multihead_attn"):
        setattr(layer, name, MultiheadAttention.from_torch(getattr(layer, name), exact))
    close(layer(x, memory, **given), wanted)


def routing() -> MultiheadAttention:
    return MultiheadAttention(DIM, HEADS, SMALL["routing"])


def test_routing_learns_in_training_alone() -> None:
    ours, x, y = routing(), tokens(), tokens(2)
    ours.eval()(x, x, x)
    assert ours.memory.centroids.shape == (HEADS, 0, DIM // HEADS)
    assert ours.auxiliary_loss is None
    ours.train()(x, x, x)
    first = ours.memory.centroids.clone()
    assert first.shape == (HEADS, 3, DIM // HEADS)
    assert ours.auxiliary_loss is not None
    assert "q_proj.weight" in grads(ours.auxiliary_loss, ours)
    ours(y, y, y)
    second = ours.memory.centroids.clone()
    assert not torch.equal(first, second)
    ours.eval()(x, x, x)
    same_bits(ours.memory.centroids, second)
    assert ours.auxiliary_loss is None
    assert MultiheadAttention(DIM, HEADS).auxiliary_loss is None


def test_routings_centroids_are_saved_and_loaded() -> None:
    ours, x, y = routing(), tokens(), tokens(2)
    for each in (x, y):
        ours(each, each, each)
    twin = copy.deepcopy(ours)
    assert ours.auxiliary_loss is not None
    assert twin.auxiliary_loss is None  # a loss belongs to the graph it came from
    torch.save(ours.state_dict(), file := io.BytesIO())
    file.seek(0)
    saved = torch.load(file)
    assert saved["memory.centroids"].shape == (HEADS, 3, DIM // HEADS)
    other = routing()
    other(y[:, :5], y[:, :5], y[:, :5])  # has centroids of its own by now
    for target in (routing(), other, twin):
        target.load_state_dict(saved)
        same_bits(target.eval()(x, x, x)[0], ours.eval()(x, x, x)[0])
        same_bits(target.train()(y, y, y)[0], copy.deepcopy(ours).train()(y, y, y)[0])
    twin.load_state_dict(routing().state_dict())  # saved before training: empty again
    assert twin.memory.centroids.shape[1] == 0
    with pytest.raises(RuntimeError, match="centroids"):
        MultiheadAttention(2 * DIM, HEADS, SMALL["routing"]).load_state_dict(saved)
    with pytest.raises(RuntimeError, match="centroids"):
        routing().load_state_dict({name: tensor for name, tensor in saved.items() if "centroids" not in name})


def test_routings_average_stays_fine_in_a_coarse_model() -> None:
    ours, x = routing().to(torch.bfloat16), tokens(dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert routing()(tokens(), tokens(2), tokens(3))[0].dtype == torch.bfloat16
    assert ours(x, x, x)[0].dtype == torch.bfloat16
    assert ours.memory.centroids.dtype == torch.float32
    ours.to(torch.bfloat16)(x, x, x)
    assert ours.memory.centroids.dtype == torch.float32
    held = ours.memory.centroids
    ours(x, x, x)
    assert ours.memory.centroids is held  # moved in place from then on


def test_torchs_layer_with_us_inside_compiles() -> None:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 24, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadAttention(DIM, HEADS, SMALL["refined"])
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    hidden = causal_mask().isinf()
    given = {"src_mask": hidden, "is_causal": True, "src_key_padding_mask": padding()}
    close(compiled(tokens(), **given), layer(tokens(), **given))
    with pytest.raises(RuntimeError, match="plain causal mask"):  # also checked inside a compiled graph
        compiled(tokens(), **{**given, "src_mask": hidden.T})
