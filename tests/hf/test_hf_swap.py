"""Swapping itself: what it leaves alone, how it is undone, plans, and looking at what flows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason='needs the extra "hf"')

import tiny
import transformers as T
from tiny import NEAR, ROUGH, answers, close, differ, same

import clusterattn as ca
from clusterattn.hf import register

# ------------------------------------------------------------------------------------------------ nothing else changes


def implementations(model: Any) -> list[str]:
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


def test_restore_puts_back_what_was_there_also_after_two_swaps() -> None:
    model, (batch, _) = tiny.make("clip"), tiny.inputs("clip")
    model.set_attn_implementation({"": "sdpa", "vision_config": "eager", "text_config": "sdpa"})
    before, wanted = implementations(model), answers(model, batch)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    assert {"sdpa", "eager"} <= set(before)
    ca.hf.swap(model, ROUGH)
    differ(answers(model, batch), wanted)
    ca.hf.swap(model, ca.Exact())
    close(answers(model, batch), wanted)
    ca.hf.swap(model.vision_model, ROUGH)
    differ(answers(model, batch), wanted)
    ca.hf.restore(model)
    assert implementations(model) == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    same(answers(model, batch), wanted)
    ca.hf.restore(model)
    assert implementations(model) == before


def test_weights_and_files_are_untouched(tmp_path: Path) -> None:
    model = tiny.make("bert")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    ca.hf.swap(model, ROUGH, exact_below=7)
    model.save_pretrained(tmp_path / "after")
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    files = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "after").iterdir())
    for name in files:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes(), name


def test_a_copy_keeps_its_methods_and_restores_by_itself() -> None:
    model, (batch, kept) = tiny.make("bert"), tiny.inputs("bert")
    exact = answers(model, batch, kept)
    ca.hf.swap(model, ROUGH)
    twin = copy.deepcopy(model)
    same(answers(twin, batch, kept), answers(model, batch, kept))
    ca.hf.restore(twin)
    same(answers(twin, batch, kept), exact)
    differ(answers(model, batch, kept), exact)


def test_the_name_works_in_from_pretrained(tmp_path: Path) -> None:
    model, (batch, kept) = tiny.make("bert"), tiny.inputs("bert")
    wanted = answers(model, batch, kept)
    model.save_pretrained(tmp_path)
    named = T.AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation=ca.hf.NAME).eval()
    assert named.config._attn_implementation == "clusterattn"
    ca.hf.swap(model, ca.Refined())
    close(answers(named, batch, kept), answers(model, batch, kept))
    named.config.clusterattn = {**ROUGH.to_dict(), "exact_below": 41}
    close(answers(named, batch, kept), wanted)
    named.config.clusterattn = str(ROUGH)
    ca.hf.swap(model, ROUGH)
    close(answers(named, batch, kept), answers(model, batch, kept))
    ca.hf.swap(named, ca.Exact())
    close(answers(named, batch, kept), wanted)
    ca.hf.restore(named)
    close(answers(named, batch, kept), answers(model, batch, kept))


def test_a_part_can_be_swapped_alone() -> None:
    model, (batch, _) = tiny.make("whisper"), tiny.inputs("whisper")
    wanted = answers(model, batch)
    report = ca.hf.swap(model.model.encoder, ROUGH)
    assert report.swapped == ["layers.0.self_attn", "layers.1.self_attn"]
    differ(answers(model, batch), wanted)
    ca.hf.swap(model.model.encoder, NEAR)
    close(answers(model, batch), wanted)  # the decoder shares the config and is exact all the while
    ca.hf.restore(model)
    assert set(implementations(model)) == {"sdpa"}


def test_a_seed_decides_what_is_drawn() -> None:
    model, (batch, _) = tiny.make("bert"), tiny.inputs("bert")
    ca.hf.swap(model, ROUGH)
    first = answers(model, batch)
    ca.hf.swap(model, ROUGH, seed=1)
    differ(answers(model, batch), first)
    ca.hf.swap(model, ROUGH, seed=0)
    same(answers(model, batch), first)


def test_a_model_inside_another_module_is_found() -> None:
    inner = tiny.make("bert")
    report = ca.hf.swap(torch.nn.Sequential(torch.nn.Identity(), inner), ROUGH)
    assert report.swapped[0] == "1.bert.encoder.layer.0.attention.self"
    ca.hf.restore(inner)  # of a part: its layers are exact again
    assert not any(hasattr(module, register.STAMP) for module in inner.modules())


# ------------------------------------------------------------------------------------------------ plans


FIRST, SECOND = (f"bert.encoder.layer.{i}.attention.self" for i in range(2))


def test_a_plan_sets_layers_apart() -> None:
    model, (batch, kept) = tiny.make("bert"), tiny.inputs("bert")
    wanted = answers(model, batch, kept)
    report = ca.hf.swap(model, ca.Plan({FIRST: NEAR}))
    assert report.rows == ((FIRST, str(NEAR), ""), (SECOND, "exact", "the plan does not name it"))
    close(answers(model, batch, kept), wanted)
    seen: list[str] = []
    with ca.hf.observe(model, lambda name, _: seen.append(name)):
        answers(model, batch, kept)
    assert seen == [FIRST, SECOND]
    ca.hf.swap(model, ca.Plan({FIRST: NEAR, SECOND: ROUGH}))
    differ(answers(model, batch, kept), wanted)
    ca.hf.swap(model, ca.Plan({FIRST: NEAR, SECOND: ROUGH}, exact_below=100))
    same(answers(model, batch, kept), wanted)
    ca.hf.swap(model, ca.Plan({SECOND: ROUGH}, exact_below=100), exact_below=0)
    differ(answers(model, batch, kept), wanted)


def test_a_plan_made_without_the_head_fits_with_it_and_others_are_refused() -> None:
    model = tiny.make("bert")
    assert ca.hf.swap(model, ca.Plan({FIRST.removeprefix("bert."): ROUGH})).swapped == [FIRST]
    assert ca.hf.swap(model.bert, ca.Plan({FIRST: ROUGH})).swapped == [FIRST.removeprefix("bert.")]
    ca.hf.restore(model)
    for plan, words in [
        (ca.Plan({"layers.7": ROUGH}), f"{FIRST}.*got 'layers.7'"),
        (ca.Plan({FIRST: [ROUGH] * 3}), "a method for each of 4 heads"),
    ]:
        with pytest.raises(ValueError, match=words):
            ca.hf.swap(model, plan)
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("heads", ["eern", "eenn", "rene", "rrrr", "nnnn"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_heads_can_have_methods_of_their_own(name: str, heads: str) -> None:
    """Each head answers as in a call where all heads have its method, also when heads share keys."""
    methods = {"e": ca.Exact(), "r": ROUGH, "n": ca.Refined(clusters=5, top=3, block=8)}
    model, (batch, kept) = tiny.make(name), tiny.inputs(name, "left")
    layer = next(iter(ca.hf.layers(model)))
    report = ca.hf.swap(model, ca.Plan({layer: tuple(methods[each] for each in heads)}))
    assert report.rows[0].method == ", ".join(f"{methods[each]} ×{heads.count(each)}" for each in dict.fromkeys(heads))
    calls: list[ca.hf.LayerCall] = []
    with ca.hf.observe(model, lambda at, call: calls.append(call) if at == layer else None):
        answers(model, batch, kept)
    call = calls[0]
    assert call.k.shape[1] == (2 if name == "llama" else 4)
    assert call.out is not None
    for head, each in enumerate(heads):
        alone = call.answer(methods[each])
        real = batch["attention_mask"].bool()
        close(call.out[:, head][real], alone[:, head][real])


# ------------------------------------------------------------------------------------------------ looking


def test_observe_shows_what_flows_and_changes_nothing() -> None:
    model, (batch, _) = tiny.make("llama"), tiny.inputs("llama", "left")
    real = batch["attention_mask"].bool()
    wanted, before = answers(model, batch), implementations(model)
    for swapped in (False, True):
        if swapped:
            ca.hf.swap(model, ROUGH)
            wanted = answers(model, batch)
        calls: dict[str, ca.hf.LayerCall] = {}
        with ca.hf.observe(model, lambda name, call, calls=calls: calls.__setitem__(name, call)):
            close(answers(model, batch)[real], wanted[real])
        assert list(calls) == list(ca.hf.layers(model))
        for call in calls.values():
            assert call.q.shape == (2, 4, 40, 8)
            assert call.k.shape == call.v.shape == (2, 2, 40, 8), "grouped heads are not repeated"
            assert call.causal
            assert call.scale == pytest.approx(8**-0.5)
            assert call.method == (ROUGH if swapped else ca.Exact())
            assert torch.equal(call.key_mask, real)
            assert torch.equal(call.query_mask, real)
            rows = real[:, None, :, None].expand_as(call.out)
            close(call.out[rows], call.answer()[rows])
        same(answers(model, batch), wanted)
    ca.hf.restore(model)
    assert implementations(model) == before
    assert not any(hasattr(module, register.STAMP) for module in model.modules())


def test_observe_cleans_up_after_an_error() -> None:
    model, (batch, _) = tiny.make("bert"), tiny.inputs("bert")

    def stop(name: str, call: ca.hf.LayerCall) -> None:
        raise RuntimeError(name)

    with pytest.raises(RuntimeError, match=r"layer\.0"), ca.hf.observe(model, stop):
        model(**batch)
    assert set(implementations(model)) == {"sdpa"}
    model(**batch)


def test_masks_without_padding_cost_the_layers_nothing() -> None:
    model, ids = tiny.make("llama"), tiny.tokens((40, 40))
    seen: list[Tensor | None] = []
    with ca.hf.observe(model, lambda _, call: seen.append(call.key_mask)):
        answers(model, ids)
    assert seen == [None, None]


class Looks(TorchDispatchMode):
    """Counts how often the host looks at a number of the device, and waits for it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_host_waits_no_more_often_than_before(name: str, padded: bool) -> None:
    """Once per forward pass at most, to see whether there is padding at all; never in a layer."""
    model, batch = tiny.make(name), tiny.tokens(tiny.LENGTHS if padded else (40, 40))

    def looks() -> list[int]:
        parts = [batch]
        if name == "llama":
            cache = {"past_key_values": T.StaticCache(config=model.config, max_cache_len=64)}
            parts = [{**batch, **cache}, {"input_ids": batch["input_ids"][:, :1], **cache}]
        counts = []
        for part in parts:
            with Looks() as seen:
                answers(model, part)
            counts.append(seen.count)
        return counts

    before = looks()
    ca.hf.swap(model, ROUGH)
    after = looks()
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def test_a_model_of_torch_is_sent_to_its_own_swap():
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with pytest.raises(ValueError, match=r"try ca\.nn\.swap"):
        ca.hf.swap(torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), "refined")
    with pytest.raises(ValueError, match="another model"):
        ca.hf.swap(torch.nn.Linear(2, 2), "refined")
