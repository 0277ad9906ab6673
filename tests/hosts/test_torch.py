"""torch's own transformers: every nn.MultiheadAttention swapped, reported, saved, loaded and put back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clusterattn as ca
from clusterattn import _report

DIM, HEADS, N = 32, 4, 48
METHOD = "refined:clusters=12,top=8"
ALL = "refined:clusters=64,top=64"  # every query its own cluster, every key near: exact


@pytest.fixture(autouse=True)
def fresh_log(caplog: pytest.LogCaptureFixture) -> None:
    _report._logged.cache_clear()
    caplog.set_level(logging.INFO, logger="clusterattn")


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 48, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2).eval()


def transformer() -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(DIM, HEADS, 2, 1, 48, dropout=0.0, batch_first=True).eval()


def tokens(n: int = N) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, n, DIM)


def padding() -> Tensor:
    return torch.arange(N) >= torch.tensor([[N], [N - 9]])


# ------------------------------------------------------------------------------------------------ swap


def test_every_attention_of_an_encoder_and_a_decoder_is_found() -> None:
    model = transformer()
    report = ca.nn.swap(model, METHOD, exact_below=8)
    assert report.swapped == [
        "encoder.layers.0.self_attn", "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn",
    ]  # fmt: skip
    assert report.kept == []
    assert "4 of 4 attention layers swapped; exact below 8 tokens" in str(report)
    assert not any(isinstance(each, nn.MultiheadAttention) for each in model.modules())


@pytest.mark.parametrize("grad", [False, True], ids=["where torch takes its fast path", "with gradients"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("method", ["exact", ALL])
def test_an_encoder_answers_as_before(method: str, padded: bool, grad: bool) -> None:
    model = encoder()
    mask = padding() if padded else None
    with torch.set_grad_enabled(grad):
        wanted = model(tokens(), src_key_padding_mask=mask)
        ca.nn.swap(model, method)
        calls = []
        for layer in model.layers:
            layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
        got = model(tokens(), src_key_padding_mask=mask)
    assert len(calls) == 2, "the fast path would not have called it"
    real = slice(None) if mask is None else ~mask
    assert torch.allclose(got[real], wanted[real], atol=1e-5)


@pytest.mark.parametrize("method", ["exact", ALL])
def test_a_transformer_with_a_causal_decoder_answers_as_before(method: str) -> None:
    model = transformer()
    causal = nn.Transformer.generate_square_subsequent_mask(N)
    wanted = model(tokens(), tokens(), tgt_mask=causal)
    ca.nn.swap(model, method)
    assert torch.allclose(model(tokens(), tokens(), tgt_mask=causal), wanted, atol=1e-5)


def test_a_method_really_answers_and_short_sequences_are_exact() -> None:
    model = encoder()
    wanted, short = model(tokens()), model(tokens(20))
    ca.nn.swap(model, METHOD, exact_below=21)
    assert not torch.allclose(model(tokens()), wanted, atol=1e-3)
    assert torch.allclose(model(tokens(20)), short, atol=1e-5)


def test_other_masks_are_answered_exactly_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = encoder()
    torch.manual_seed(3)
    mask = (torch.rand(N, N) < 0.3) & ~torch.eye(N, dtype=torch.bool)
    wanted = model(tokens(), mask=mask)
    ca.nn.swap(model, METHOD)
    assert torch.allclose(model(tokens(), mask=mask), wanted, atol=1e-5)
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["MultiheadAttention stays exact: the mask says more than causality and padding"]


def test_a_module_that_nobody_swapped_still_refuses_them() -> None:
    layer = ca.nn.MultiheadAttention(DIM, HEADS, METHOD)
    with pytest.raises(ValueError, match="Refined cannot honour a dense mask"):
        layer(tokens(), tokens(), tokens(), attn_mask=torch.eye(N, dtype=torch.bool))


def test_what_stays_torchs_and_why() -> None:
    class Own(nn.MultiheadAttention):
        pass

    model = nn.ModuleDict(
        {
            "plain": nn.MultiheadAttention(DIM, HEADS),
            "more": nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True),
            "own": Own(DIM, HEADS),
            "cross": nn.MultiheadAttention(DIM, HEADS),
        }
    )
    report = ca.nn.swap(model, "clusterformer")
    assert {row.layer: row.reason for row in report.rows} == {
        "plain": "",
        "more": "it adds keys of its own (add_bias_kv, add_zero_attn)",
        "own": "Own is a class of its own",
        "cross": "ClusterFormer is self-attention only",
    }
    assert ca.nn.swap(model, "reformer").swapped == []
    assert type(model["plain"]) is nn.MultiheadAttention


def test_one_module_in_two_places_stays_one() -> None:
    shared = nn.MultiheadAttention(DIM, HEADS)
    model = nn.ModuleList([shared, shared])
    ca.nn.swap(model, METHOD)
    assert model[0] is model[1]
    assert isinstance(model[0], ca.nn.MultiheadAttention)


def test_a_plan_by_names_and_kinds() -> None:
    plan = ca.Plan({"decoder.layers.0.self_attn": METHOD, "decoder.layers.0.multihead_attn": METHOD}, 8, kind="self")
    report = ca.nn.swap(transformer(), plan)
    assert report.swapped == ["decoder.layers.0.self_attn"]
    assert report.exact_below == 8
    assert {row.reason for row in report.rows if row.reason} == {
        "the plan does not name it", "the plan was made for self-attention",
    }  # fmt: skip
    with pytest.raises(ValueError, match="wanted a plan for torch; got one for vggt"):
        ca.nn.swap(transformer(), ca.Plan({}, host="vggt"))
    with pytest.raises(ValueError, match="wanted one method for all heads"):
        ca.nn.swap(encoder(), ca.Plan({"layers.0.self_attn": [METHOD] * HEADS}))


def test_what_is_wrong_with_a_swap_is_said() -> None:
    with pytest.raises(ValueError, match=r"wanted a module with .*MultiheadAttention in it; got Linear"):
        ca.nn.swap(nn.Linear(2, 2), METHOD)
    with pytest.raises(ValueError, match="from_torch"):
        ca.nn.swap(nn.MultiheadAttention(DIM, HEADS), METHOD)
    with pytest.raises(TypeError, match="wanted a module"):
        ca.nn.swap("encoder", METHOD)  # type: ignore[arg-type]


def test_swapping_again_and_restoring_keep_the_weights_of_now() -> None:
    model = encoder()
    wanted = model(tokens())
    ca.nn.swap(model, METHOD)
    ca.nn.swap(model, "exact")
    assert torch.allclose(model(tokens()), wanted, atol=1e-5)
    with torch.no_grad():
        model.layers[0].self_attn.v_proj.weight.mul_(2)
    doubled = model(tokens())
    ca.nn.restore(model)
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model.layers)
    assert torch.allclose(model(tokens()), doubled, atol=1e-5)
    ca.nn.restore(model)


# ------------------------------------------------------------------------------------------------ weights


CASES: list[dict[str, Any]] = [{}, {"bias": False}, {"kdim": 24, "vdim": 20}, {"batch_first": True, "dropout": 0.1}]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_there_and_back_again(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(DIM, HEADS, **options)
    nn.init.normal_(theirs.in_proj_bias) if theirs.in_proj_bias is not None else None
    back = ca.nn.MultiheadAttention.from_torch(theirs, METHOD).to_torch()
    assert {name: x.shape for name, x in back.state_dict().items()} == {
        name: x.shape for name, x in theirs.state_dict().items()
    }
    assert all(torch.equal(x, back.state_dict()[name]) for name, x in theirs.state_dict().items())
    assert (back.batch_first, back.dropout, back.training) == (theirs.batch_first, theirs.dropout, theirs.training)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_what_torch_saved_is_loaded(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(DIM, HEADS, **options)
    ours = ca.nn.MultiheadAttention(DIM, HEADS, "exact", **options)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    wanted = ca.nn.MultiheadAttention.from_torch(theirs, "exact").state_dict()
    assert all(torch.equal(x, wanted[name]) for name, x in ours.state_dict().items())


def test_checkpoints_of_the_unswapped_model_load_into_the_swapped_one() -> None:
    trained, model = encoder(), encoder()
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(0.1)
    saved = trained.state_dict()
    before = dict(saved)
    ca.nn.swap(model, "exact")
    model.load_state_dict(saved)
    assert saved.keys() == before.keys()
    assert torch.allclose(model(tokens()), trained(tokens()), atol=1e-5)
    ca.nn.restore(model)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in before.items())


def test_a_module_that_torch_has_no_room_for_stays_ours() -> None:
    for options in ({"kv_heads": 2}, {"shared_qk": True}):
        with pytest.raises(ValueError, match="wanted projections as torch has them"):
            ca.nn.MultiheadAttention(DIM, HEADS, METHOD, **options).to_torch()


def test_routing_is_made_from_torch_too() -> None:
    model = encoder()
    ca.nn.swap(model, "routing")
    model.train()(tokens()).sum().backward()
    assert model.layers[0].self_attn.auxiliary_loss is not None


# ------------------------------------------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("call", "word", "ours"),
    [
        (lambda x: ca.attention(x, x, x, is_causal=True), "is_causal=", "causal="),
        (lambda x: ca.attention(x, x, x, enable_gqa=True), "enable_gqa=", "fewer key heads"),
        (lambda x: ca.nn.MultiheadAttention(8, num_heads=2, heads=2), "num_heads=", "heads="),
        (lambda x: ca.nn.MultiheadAttention(8, 2, enable_gqa=True), "enable_gqa=", "kv_heads="),
        (lambda x: ca.nn.MultiheadAttention(8, 2, is_causal=True), "is_causal=", "causal=True"),
        (lambda x: ca.attention(x, x, x, colour=1), "colour=", "one of its arguments"),
    ],
)
def test_torchs_words_are_answered_with_ours(call: Callable[[Tensor], Any], word: str, ours: str) -> None:
    with pytest.raises(TypeError, match=f"got {word}; try .*{ours}"):
        call(torch.randn(1, 2, 8, 4))
