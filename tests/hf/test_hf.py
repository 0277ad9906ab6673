"""Pretrained models, swapped: their answers, their generating, and what no method can honour."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

pytest.importorskip("transformers", reason='needs the extra "hf"')

import tiny
import transformers as T
from tiny import NEAR, ROUGH, answers, close, differ, logits, same

import clusterattn as ca
from clusterattn import _report
from clusterattn.hf import register


@pytest.fixture(autouse=True)
def fresh_log(caplog: pytest.LogCaptureFixture) -> None:
    _report._logged.cache_clear()
    caplog.set_level(logging.INFO, logger="clusterattn")


# ------------------------------------------------------------------------------------------------ every model


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", tiny.ISSUE)
def test_exact_and_all_keys_near_change_no_logit(name: str, side: str) -> None:
    model, (batch, kept) = tiny.make(name), tiny.inputs(name, side)
    wanted = answers(model, batch, kept)
    ca.hf.swap(model, ca.Exact())
    close(answers(model, batch, kept), wanted)
    report = ca.hf.swap(model, NEAR)
    close(answers(model, batch, kept), wanted)
    ca.hf.swap(model, ROUGH)
    if report.swapped:
        differ(answers(model, batch, kept), wanted)
    ca.hf.restore(model)
    same(answers(model, batch, kept), wanted)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "llama", "qwen3", "gpt2", "gemma3"])
def test_a_sequence_is_answered_in_a_padded_batch_as_alone(name: str, side: str) -> None:
    """Far from exact, so that grouping padded tokens, or cutting blocks elsewhere, would show."""
    model = tiny.make(name)
    ca.hf.swap(model, ROUGH)
    extra = {"positions": name != "roberta"}  # RoBERTa counts past the padding by itself
    batch = tiny.tokens(side=side, **extra)
    together = answers(model, batch)
    for row in range(len(tiny.LENGTHS)):
        kept = batch["attention_mask"][row].bool()
        alone = {key: value[row : row + 1, kept] for key, value in batch.items()}
        close(together[row : row + 1, kept], answers(model, alone))


@pytest.mark.parametrize("name", [name for name in tiny.ISSUE if name != "t5"])
def test_gradients_flow(name: str) -> None:
    model, (batch, kept) = tiny.make(name), tiny.inputs(name)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        logits(model, batch, kept).square().mean().backward()
        return {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}

    wanted = gradients()
    ca.hf.swap(model, NEAR)
    got = gradients()
    assert got.keys() == wanted.keys()
    for key in wanted:
        torch.testing.assert_close(got[key], wanted[key], rtol=1e-2, atol=1e-4 * float(wanted[key].abs().max()) + 1e-6)
    ca.hf.swap(model, ROUGH)
    assert all(value.isfinite().all() for value in gradients().values())


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("padded", [True, False])
def test_compiles_to_one_graph(name: str, padded: bool) -> None:
    torch._dynamo.reset()
    model, (batch, kept) = tiny.make(name), tiny.inputs(name)
    if not padded:
        batch, kept = {"input_ids": batch["input_ids"]}, None
    ca.hf.swap(model, ROUGH)
    wanted = answers(model, batch, kept)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(answers(compiled, batch, kept), wanted)
    ca.hf.restore(compiled)
    differ(answers(model, batch, kept), wanted)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_lengths_share_a_graph(name: str) -> None:
    torch._dynamo.reset()
    model, counter = tiny.make(name), CompileCounter()
    ca.hf.swap(model, ca.Refined(clusters=8, top=8, parts=1, slope=False, steps=2, block=64))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for n in (40, 57, 33):
        batch = tiny.tokens((n, n - 9), positions=name == "llama")
        kept = batch["attention_mask"].bool()
        close(answers(compiled, batch, kept), answers(model, batch, kept))
    assert counter.frame_count == 1


def test_a_checkpointed_backward_pass_sees_the_same_groups() -> None:
    model, (batch, kept) = tiny.make("llama").train(), tiny.inputs("llama")
    ca.hf.swap(model, ROUGH)
    logits(model, batch, kept).square().mean().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    logits(model, batch, kept).square().mean().backward()
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        close(parameter.grad, want)


def test_a_decoder_made_bidirectional_is_not_causal() -> None:
    model, (batch, kept) = tiny.make("llama"), tiny.inputs("llama")
    causal = answers(model, batch, kept)
    model.config.is_causal = False
    wanted = answers(model, batch, kept)
    differ(wanted, causal)
    ca.hf.swap(model, NEAR)
    close(answers(model, batch, kept), wanted)


def test_half_precision_and_autocast() -> None:
    model, (batch, kept) = tiny.make("llama"), tiny.inputs("llama")
    ca.hf.swap(model, NEAR)
    wanted = answers(model, batch, kept)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (answers(model, batch, kept).float() - wanted).norm() < 0.1 * wanted.norm()
    assert (answers(model.bfloat16(), batch, kept).float() - wanted).norm() < 0.1 * wanted.norm()


# ------------------------------------------------------------------------------------------------ generating


def generate(model: Any, batch: dict[str, Tensor], **how: Any) -> Tensor:
    out: Tensor = model.generate(**batch, max_new_tokens=6, do_sample=False, **how)
    return out


def prompt(name: str) -> dict[str, Tensor]:
    batch = tiny.inputs(name, "left")[0]
    return {key: batch[key] for key in ("input_ids", "attention_mask", "input_features") if key in batch}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", tiny.GENERATING)
def test_generate_runs_with_a_cache(name: str, cache: str) -> None:
    model, batch = tiny.make(name), prompt(name)
    how = {"cache_implementation": cache} if cache == "static" else {}
    wanted = generate(model, batch, **how)
    seen: list[tuple[int, int]] = []
    for method in (ca.Exact(), NEAR):
        ca.hf.swap(model, method)
        with ca.hf.observe(model, lambda _, call: seen.append((call.q.shape[2], call.k.shape[2]))):
            assert torch.equal(generate(model, batch, **how), wanted)
    assert all(n > 1 for n, _ in seen)
    if name not in ("t5", "whisper"):
        assert set(seen) == {(40, 40)}, "the prompt goes through the method, also from a cache with room to spare"


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("static", [True, False])
def test_a_continued_prompt_stands_behind_the_cache(static: bool, padded: bool) -> None:
    """Query i of n is at position m - n + i of what the cache holds."""
    model = tiny.make("llama")
    batch = tiny.tokens(side="left", positions=True) if padded else {"input_ids": tiny.tokens((40, 40))["input_ids"]}
    kept = batch["attention_mask"].bool() if padded else torch.ones(2, 40, dtype=torch.bool)
    wanted = answers(model, batch)
    shapes: list[tuple[int, int]] = []
    for method in (ca.Exact(), NEAR, ca.Clustered(clusters=64, metric="euclid", block=8, centroids_from="block")):
        ca.hf.swap(model, method)
        cache = T.StaticCache(config=model.config, max_cache_len=64) if static else T.DynamicCache(config=model.config)
        got = []
        with ca.hf.observe(model, lambda _, call: shapes.append((call.q.shape[2], call.k.shape[2]))):
            for part in (slice(0, 17), slice(17, 33), slice(33, 34), slice(34, 40)):
                piece = {key: value[:, part] for key, value in batch.items()}
                if padded:
                    piece["attention_mask"] = batch["attention_mask"][:, : part.stop]
                got.append(answers(model, {**piece, "past_key_values": cache}))
        close(torch.cat(got, 1)[kept], wanted[kept])
    assert set(shapes) == {(17, 17), (16, 33), (6, 40)}


def test_a_compiled_step_reads_a_static_cache() -> None:
    """How full the cache is must not be looked at in a graph: those steps are exact, with the mask of SDPA."""
    torch._dynamo.reset()
    model, ids = tiny.make("llama"), tiny.tokens((40, 40))["input_ids"]
    wanted = answers(model, {"input_ids": ids})
    ca.hf.swap(model, NEAR)
    cache = T.StaticCache(config=model.config, max_cache_len=64)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    got = [answers(model, {"input_ids": ids[:, :30], "past_key_values": cache})]
    for part in (slice(30, 31), slice(31, 32), slice(32, 40)):
        got.append(answers(compiled, {"input_ids": ids[:, part], "past_key_values": cache}))
    close(torch.cat(got, 1), wanted)


def test_a_method_for_self_attention_only_leaves_continued_prompts_exact(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = tiny.make("llama"), tiny.tokens((40, 40))["input_ids"]
    ca.hf.swap(model, ca.Reformer(chunk=8))
    cache = T.DynamicCache(config=model.config)
    answers(model, {"input_ids": ids[:, :20], "past_key_values": cache})
    assert not caplog.records
    answers(model, {"input_ids": ids[:, 20:30], "past_key_values": cache})
    answers(model, {"input_ids": ids[:, 30:], "past_key_values": cache})
    assert [r.getMessage() for r in caplog.records if "as many keys" in r.getMessage()] == [
        f"model.layers.{i}.self_attn stays exact: Reformer needs as many keys as queries, which a cache or "
        "cross-attention breaks"
        for i in range(2)
    ]


# ------------------------------------------------------------------------------------------------ what stays exact


@pytest.mark.parametrize(
    ("name", "kept", "why"),
    [
        ("modernbert", ["model.layers.1.attn"], "sliding attention"),
        ("gemma3", ["model.layers.0.self_attn"], "sliding attention"),
        ("mistral", ["model.layers.0.self_attn", "model.layers.1.self_attn"], "sliding window of 8"),
        ("gemma2", ["model.layers.0.self_attn", "model.layers.1.self_attn"], "softcap"),
        ("gpt_oss", ["model.layers.0.self_attn", "model.layers.1.self_attn"], "sinks"),
        ("t5", "all", "position bias"),
        ("pix2struct", "all", ""),
    ],
)
def test_the_report_says_what_stays_exact_and_why(name: str, kept: Any, why: str) -> None:
    model = tiny.make(name)
    report = ca.hf.swap(model, ROUGH)
    assert report.kept == ([row.layer for row in report.rows] if kept == "all" else kept)
    assert all(why in row.reason and row.method == "exact" for row in report.rows if row.reason)
    assert all(row.method == str(ROUGH) for row in report.rows if not row.reason)
    assert f"{len(report.swapped)} of {len(report.rows)} attention layers swapped" in str(report)
    assert list(ca.hf.layers(model)) == report.swapped
    if not report.swapped:
        assert model.config._attn_implementation in ("sdpa", "eager"), "a model with nothing to swap is left alone"


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "gemma3", "mistral", "modernbert", "t5", "whisper", "clip"])
def test_the_registered_name_honours_what_methods_cannot(name: str) -> None:
    """set_attn_implementation("clusterattn") knows no layers beforehand: every call must find its own obstacles."""
    model, (batch, kept) = tiny.make(name), tiny.inputs(name)
    model.set_attn_implementation("eager")  # which honours everything
    wanted = answers(model, batch, kept)
    model.set_attn_implementation("clusterattn")
    for config in (model.config, *(getattr(model.config, part) for part in model.config.sub_configs)):
        config.clusterattn = NEAR.to_dict()
    close(answers(model, batch, kept), wanted)


def test_settings_that_no_swapped_model_could_honour_are_refused() -> None:
    model, (batch, _) = tiny.make("bert"), tiny.inputs("bert")
    with pytest.raises(ValueError, match=r"without trained centroids and losses; got balance=0\.1"):
        ca.hf.swap(model, "clusterformer:balance=0.1")
    model.set_attn_implementation("clusterattn")
    model.config.clusterattn = "clusterformer:balance=0.1"
    with pytest.raises(ValueError, match=r"without trained centroids and losses; got balance=0\.1"):
        model(**batch)


def test_what_is_known_only_in_a_call_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.make("llama")
    ids = tiny.tokens((40,))["input_ids"]
    by_hand = {"input_ids": ids, "attention_mask": torch.ones(1, 1, 40, 40, dtype=torch.bool).tril(3)}
    wanted = answers(model, by_hand)
    ca.hf.swap(model, ROUGH)
    assert not caplog.records
    same(answers(model, by_hand), wanted)
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        f"model.layers.{i}.self_attn stays exact" for i in range(2)
    ]


@pytest.mark.parametrize("name", ["bert", "llama", "whisper"])
def test_weights_that_are_asked_for_are_the_exact_ones(name: str) -> None:
    model, (batch, _) = tiny.make(name), tiny.inputs(name)
    model.set_attn_implementation("eager")
    wanted = model(**batch, output_attentions=True)
    model.set_attn_implementation("sdpa")
    ca.hf.swap(model, ROUGH)
    got = model(**batch, output_attentions=True)
    field = "encoder_attentions" if name == "whisper" else "attentions"
    assert len(got[field]) == len(wanted[field]) == 2
    for one, other in zip(got[field], wanted[field], strict=True):
        real = batch["attention_mask"].bool()[:, None, :, None] if "attention_mask" in batch else 1
        close(one * real, other * real)
    ca.hf.restore(model)


def test_dropout_in_training_stays_exact(caplog: pytest.LogCaptureFixture) -> None:
    model, (batch, kept) = tiny.make("bert"), tiny.inputs("bert")
    for layer in ca.hf.layers(model).values():
        layer.dropout.p = 0.5

    def out() -> Tensor:
        torch.manual_seed(0)
        return answers(model, batch, kept)

    calm, wanted = out(), (model.train(), out())[1]
    differ(wanted, calm)
    ca.hf.swap(model, ROUGH)
    close(out(), wanted)
    assert "dropout" in caplog.text
    model.eval()
    differ(out(), calm)


def test_short_sequences_stay_exact() -> None:
    model, (batch, kept) = tiny.make("bert"), tiny.inputs("bert")
    wanted = answers(model, batch, kept)
    report = ca.hf.swap(model, ROUGH, exact_below=41)
    assert "exact below 41 tokens" in str(report)
    same(answers(model, batch, kept), wanted)
    ca.hf.swap(model, ROUGH, exact_below=40)
    differ(answers(model, batch, kept), wanted)
    with pytest.raises(ValueError, match="exact_below a whole number"):
        ca.hf.swap(model, ROUGH, exact_below=-1)


@dataclass(frozen=True, kw_only=True)
class Sideways(ca.Method):
    name: ClassVar[str] = "sideways"


def test_a_method_that_cannot_be_causal_is_refused() -> None:
    model = tiny.make("llama")
    with pytest.raises(ValueError, match=r"can be causal for model.layers.0.self_attn: exact, clustered.*got sideways"):
        ca.hf.swap(model, Sideways())
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(module, register.STAMP) for module in model.modules())


@pytest.mark.parametrize(
    "model",
    [
        lambda: T.LongformerModel(T.LongformerConfig(**tiny.TEXT, attention_window=4)),
        lambda: T.ReformerModel(T.ReformerConfig(hidden_size=32, attn_layers=["local"], axial_pos_embds_dim=(16, 16))),
        lambda: torch.nn.Linear(2, 2),
    ],
    ids=["longformer", "reformer", "linear"],
)
def test_a_model_without_the_interface_is_refused_and_unchanged(model: Any) -> None:
    model = model()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=f"attention interface; got {type(model).__name__}"):
        ca.hf.swap(model, ROUGH)
    assert before == {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(TypeError, match="wanted a model"):
        ca.hf.swap("bert", ROUGH)
