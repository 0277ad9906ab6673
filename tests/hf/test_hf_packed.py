"""Packed sequences in a swapped model: every document as if it were alone, however the model is told of them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason='needs the extra "hf"')

import tiny
import transformers as T
from tiny import ROUGH, answers, close, differ, same
from transformers import masking_utils
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

import clusterattn as ca
from clusterattn import _documents, _report
from clusterattn.hf import packed

LENGTHS = (25, 15, 33)
BOTH = ca.Refined(clusters=3, top=2, parts=3, slope=True, steps=2)  # for layers that are not causal


@pytest.fixture(autouse=True)
def fresh_log(caplog: pytest.LogCaptureFixture) -> None:
    _report._logged.cache_clear()
    caplog.set_level(logging.WARNING, logger="clusterattn")  # what stays exact, and why


def texts() -> list[Tensor]:
    return [row[: LENGTHS[i]] for i, row in enumerate(tiny.tokens(LENGTHS)["input_ids"])]


def flattened(**settings: Any) -> dict[str, Any]:
    """As transformers packs a batch for training: one row, positions that begin anew."""
    collator = T.DataCollatorWithFlattening(return_tensors="pt", **settings)
    batch = dict(collator([{"input_ids": text.tolist()} for text in texts()]))
    batch.pop("labels")
    return {**batch, "use_cache": False}


def alone(model: Any, **more: Any) -> Tensor:
    return torch.cat([answers(model, {"input_ids": text[None], **more}) for text in texts()], 1)


def blocks(causal: bool) -> Tensor:
    """(1 1 n n): who sees whom."""
    seen = torch.block_diag(*(torch.ones(length, length) for length in LENGTHS)).bool()
    return (seen.tril() if causal else seen)[None, None]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_documents_of_a_causal_model_answer_as_they_do_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.make(name)
    exact = answers(model, flattened())
    ca.hf.swap(model, ROUGH)
    got = answers(model, flattened())
    close(got, alone(model))
    differ(got, exact)
    assert not caplog.records


def test_rows_of_a_batch_hold_documents_of_their_own() -> None:
    model = tiny.make("llama")
    ids = tiny.tokens((40, 40))["input_ids"]
    positions = torch.stack([torch.cat([torch.arange(25), torch.arange(15)]), torch.arange(40)])
    ca.hf.swap(model, ROUGH)
    got = answers(model, {"input_ids": ids, "position_ids": positions, "use_cache": False})
    wanted = [answers(model, {"input_ids": part}) for part in (ids[:1, :25], ids[:1, 25:], ids[1:])]
    close(got[:1], torch.cat(wanted[:2], 1))
    close(got[1:], wanted[2])


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_words_of_flash_attention_tell_documents_apart(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny.make(name), flattened(return_flash_attn_kwargs=True)
    if name == "bert":
        batch.pop("use_cache")
    ca.hf.swap(model, ROUGH if name == "llama" else BOTH)
    close(answers(model, batch), alone(model))
    ca.hf.swap(model, BOTH if name == "bert" else ROUGH, exact_below=1000)
    exact = answers(model, batch)
    ca.hf.restore(model)
    close(exact, alone(model))
    assert not caplog.records


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_dense_mask_that_only_tells_documents_apart(name: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny.make(name), flattened()
    mask = blocks(causal=name == "llama")
    batch["attention_mask"] = mask if kind == "bool" else torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    if name == "bert":
        batch.pop("use_cache")
    exact = answers(model, batch)
    ca.hf.swap(model, ROUGH if name == "llama" else BOTH)
    got = answers(model, batch)
    close(got, alone(model))
    differ(got, exact)
    assert not caplog.records
    ca.hf.swap(model, ROUGH, exact_below=1000)
    same(answers(model, batch), exact)


def test_a_dense_mask_that_says_more_stays_exact(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny.make("llama"), flattened()
    hole = blocks(causal=True)
    hole[..., 5, 2] = False
    biased = torch.where(blocks(causal=True), 0.0, torch.finfo(torch.float32).min)
    biased[..., 5, 2] = -1.0
    for mask in (hole, biased):
        exact = answers(model, {**batch, "attention_mask": mask})
        ca.hf.swap(model, ROUGH)
        same(answers(model, {**batch, "attention_mask": mask}), exact)
        ca.hf.restore(model)
    assert len(caplog.records) == 2  # a line for each layer


def test_what_is_exact_because_it_is_short_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny.make("llama"), {**flattened(), "attention_mask": blocks(causal=True)}
    exact = answers(model, batch)
    ca.hf.swap(model, ROUGH, exact_below=1000)
    same(answers(model, batch), exact)
    assert not caplog.records


def test_exact_layers_see_the_documents_too() -> None:
    """Below exact_below, beside weights that are asked for, and in layers that a plan does not name."""
    model, batch = tiny.make("llama"), flattened()
    exact = answers(model, batch)
    for method, more in ((ca.Exact(), {}), (ROUGH, {"exact_below": 1000})):
        ca.hf.swap(model, method, **more)
        same(answers(model, batch), exact)
    ca.hf.restore(model)
    model.set_attn_implementation("eager")
    wanted = model(**batch, output_attentions=True)
    model.set_attn_implementation("sdpa")
    ca.hf.swap(model, ROUGH)
    got = model(**batch, output_attentions=True)
    close(got.logits, wanted.logits)
    close(got.attentions[1], wanted.attentions[1])


def test_a_model_that_names_us_in_its_config() -> None:
    """Its mask is dense, and looked at."""
    model, batch = tiny.make("llama"), flattened()
    model.config.clusterattn = ROUGH.to_dict()
    model.set_attn_implementation("clusterattn")
    close(answers(model, batch), alone(model))


def test_gradients_of_packed_documents() -> None:
    model, batch = tiny.make("llama"), flattened()
    ca.hf.swap(model, ROUGH)
    weight = model.model.layers[0].self_attn.k_proj.weight
    together = model(**batch).logits.square().mean()
    apart = torch.cat([model(input_ids=text[None]).logits for text in texts()], 1).square().mean()
    close(*(torch.autograd.grad(loss, weight)[0] * 100 for loss in (together, apart)))


def test_a_method_for_each_head_and_methods_for_self_attention() -> None:
    model, batch = tiny.make("llama"), flattened()
    names = list(ca.hf.layers(model))
    for plan in (ca.Plan({names[0]: (ROUGH, ca.Exact(), ROUGH, ca.Local(window=8)), names[1]: ca.Reformer(chunk=4)}),):
        ca.hf.swap(model, plan)
        close(answers(model, batch), alone(model))


def test_numbers_are_read_once_in_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read, look = _documents._read_ids, packed._read_dense
    monkeypatch.setattr(_documents, "_read_ids", lambda *given: reads.append("ids") or read(*given))
    monkeypatch.setattr(packed, "_read_dense", lambda *given: reads.append("dense") or look(*given))
    model = tiny.make("llama")
    ca.hf.swap(model, ROUGH)
    answers(model, flattened())
    assert reads == ["ids"]
    answers(model, {**flattened(), "attention_mask": blocks(causal=True)})
    assert reads == ["ids", "dense", "ids"]


def test_packed_calls_are_not_shown() -> None:
    model, seen = tiny.make("llama"), []
    ca.hf.swap(model, ROUGH)
    wanted = answers(model, flattened())
    with ca.hf.observe(model, lambda name, call: seen.append(name)):
        same(answers(model, flattened()), wanted)
        assert not seen
        answers(model, {"input_ids": texts()[0][None]})
    assert len(seen) == 2


def test_what_a_mask_function_says() -> None:
    ids = torch.tensor([[0, 0, 1]])
    told = packed_sequence_mask_function(ids)
    assert packed.in_function(and_masks(causal_mask_function, told)) is ids
    for other in (causal_mask_function, told, and_masks(told), and_masks(told, causal_mask_function)):
        assert packed.in_function(other) is None
    assert packed.in_function(and_masks(causal_mask_function, told, told)) is None
    assert packed.in_function(and_masks(causal_mask_function, causal_mask_function)) is None


def test_what_transformers_says_of_documents_however_it_puts_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that it makes for a causal model, for one with a window, and for one with a mask of its own."""
    said: list[Any] = []
    monkeypatch.setitem(
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "told", lambda **given: said.append(given)
    )
    config = T.LlamaConfig(sliding_window=2)
    config._attn_implementation = "told"
    given = {
        "config": config, "inputs_embeds": torch.zeros(2, 5, 8), "attention_mask": None, "past_key_values": None,
        "position_ids": torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]),
    }  # fmt: skip
    masking_utils.create_causal_mask(**given)
    masking_utils.create_sliding_window_causal_mask(**given)
    masking_utils.create_causal_mask(**given, and_mask_function=lambda b, h, q, k: k > 0)
    found = [packed.in_function(each["mask_function"]) for each in said]
    assert found[0].tolist() == [[0, 0, 0, 1, 1], [0] * 5]
    assert found[1:] == [None, None]
