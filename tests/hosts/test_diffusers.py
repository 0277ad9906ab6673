"""diffusers: its dispatcher, its models and its context parallelism, with random weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", reason="needs diffusers")

from diffusers.models import attention_dispatch as dispatch
from tiny_diffusers import (
    METHOD,
    TEXT,
    answer,
    flux,
    flux_inputs,
    gradients_over_ranks,
    model_over_ranks,
    on_two_ranks,
    qkv,
    wan,
    wan_inputs,
    weigh,
)

import clusterattn as ca
from clusterattn import _report

D = ca.hosts.diffusers


@pytest.fixture(autouse=True)
def registry_as_before(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    _report._logged.cache_clear()
    caplog.set_level(logging.INFO, logger="clusterattn")
    yield
    D.unregister()
    assert dispatch._AttentionBackendRegistry._active_backend == dispatch.AttentionBackendName.NATIVE


def ask(**options: Any) -> Tensor:
    q, k, v = (options.pop(name, x) for name, x in zip("qkv", qkv(), strict=True))
    name = dispatch.AttentionBackendName(options.pop("backend", "clusterattn"))
    out: Tensor = dispatch.dispatch_attention_fn(q, k, v, backend=name, **options)
    return out


def reasons(served: Any) -> dict[str, int]:
    return {row.reason or row.method: row.calls for row in served.rows}


# ------------------------------------------------------------------------------------------------ a backend


def test_the_backend_answers_with_the_method() -> None:
    served = D.register(METHOD, min_length=64)
    q, k, v = qkv()
    ours = ca.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), method=METHOD).transpose(1, 2)
    assert torch.equal(ask(), ours)
    assert reasons(served) == {METHOD: 1}


def test_exact_as_a_method_is_native_attention_to_the_bit() -> None:
    D.register("exact", min_length=0)
    assert torch.equal(ask(), ask(backend="native"))


def test_short_calls_and_cross_attention_are_native_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    served = D.register(METHOD, min_length=200)
    short = {name: x[:, :199] for name, x in zip("qkv", qkv(), strict=True)}
    assert torch.equal(ask(**short), ask(backend="native", **short))
    across = {"q": qkv()[0][:, :230]}
    assert torch.equal(ask(**across), ask(backend="native", **across))
    assert reasons(served) == {"shorter than 200 tokens": 1, "cross-attention": 1}
    assert not caplog.records


def test_cross_attention_is_served_where_it_is_asked_for() -> None:
    served = D.register(METHOD, min_length=64, cross=True)
    q, k, v = qkv()
    q = q[:, :230]
    ours = ca.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), method=METHOD).transpose(1, 2)
    assert torch.equal(ask(q=q), ours)
    assert served.swapped == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attn_mask": torch.ones(256, 256).tril().bool()}, "the mask says more than padding of keys"),
        ({"attn_mask": torch.randn(1, 1, 1, 256)}, "the mask says more than padding of keys"),
        ({"dropout_p": 0.5}, "attention dropout needs the weights"),
    ],
)
def test_what_cannot_be_honoured_is_native_and_said_once(
    options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = D.register(METHOD, min_length=64)
    for _ in range(2):
        torch.manual_seed(0)
        ours = ask(**options)
        torch.manual_seed(0)
        assert torch.equal(ours, ask(backend="native", **options))
    assert reasons(served) == {reason: 2}
    assert [record.getMessage() for record in caplog.records] == [f"clusterattn stays exact: {reason}"]


@pytest.mark.parametrize("shape", [(1, 256), (1, 1, 1, 256)])
def test_masks_of_padding_are_honoured(shape: tuple[int, ...]) -> None:
    served = D.register(METHOD, min_length=64)
    keys = torch.arange(256) < 200
    masked = ask(attn_mask=keys.view(shape))
    q, k, v = qkv()
    k[:, 200:], v[:, 200:] = torch.nan, torch.nan
    assert torch.equal(masked, ask(k=k, v=v, attn_mask=keys.view(shape)))
    assert served.swapped == 2


def test_causal_calls_go_to_methods_that_can() -> None:
    served = D.register("improved:clusters=16,top=8", min_length=64)
    exact = ask(backend="native", is_causal=True)
    out = ask(is_causal=True)
    assert served.swapped == 1
    assert torch.allclose(out[:, 0], exact[:, 0], atol=1e-5), "the first token sees itself alone"


def test_a_method_that_cannot_be_causal_leaves_causal_calls_alone() -> None:
    class Timeless(ca.Refined):
        causality = "no"

    served = D.register(Timeless(clusters=20), min_length=64)
    assert torch.equal(ask(is_causal=True), ask(backend="native", is_causal=True))
    assert reasons(served) == {"Timeless cannot be causal": 1}


@pytest.mark.parametrize("rows", [40, -40])
def test_conditioning_rows_are_exact(rows: int) -> None:
    D.register(METHOD, min_length=64, exact_rows=rows)
    out, exact = ask(), ask(backend="native")
    chosen = slice(0, 40) if rows > 0 else slice(-40, None)
    assert torch.allclose(out[:, chosen], exact[:, chosen], atol=1e-6)
    others = slice(40, None) if rows > 0 else slice(0, -40)
    assert not torch.allclose(out[:, others], exact[:, others], atol=1e-4)


def test_settings_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted exact_below a whole number"):
        D.register(METHOD, min_length=-1)
    with pytest.raises(ValueError, match="without trained centroids and losses"):
        D.register("clusterformer:balance=0.1")
    with pytest.raises(ValueError, match="wanted exact_rows a whole number"):
        D.register(METHOD, exact_rows=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wanted a method"):
        D.register("nothing")


# ------------------------------------------------------------------------------------------------ models


def test_a_model_is_set_to_the_backend_and_reset() -> None:
    model = wan()
    before = answer(model, wan_inputs())
    served = D.register(METHOD, min_length=64)
    model.set_attention_backend("clusterattn")
    swapped = answer(model, wan_inputs())
    assert reasons(served) == {METHOD: 2, "cross-attention": 2}
    assert 1e-5 < (swapped - before).abs().max() < 0.1
    model.reset_attention_backend()
    D.unregister()
    assert torch.equal(answer(model, wan_inputs()), before)
    with pytest.raises(ValueError, match="must be one of"):
        model.set_attention_backend("clusterattn")


def test_swap_reports_layers_and_restore_undoes_it() -> None:
    model = wan()
    before = answer(model, wan_inputs())
    report = D.swap(model, METHOD, min_length=64, dense_layers=[-1])
    assert report.swapped == ["blocks.0.attn1"]
    assert [row.reason for row in report.rows] == ["", "cross-attention", "a dense layer", "cross-attention"]
    assert not torch.equal(answer(model, wan_inputs()), before)
    assert reasons(report.served) == {METHOD: 1, "the layer stays exact": 3}
    assert "1 of 4 attention layers swapped; exact below 64 tokens" in str(report)
    assert "1 of 4 attention calls by clustering" in str(report.served)
    D.restore(model)
    assert torch.equal(answer(model, wan_inputs()), before)
    assert len(dispatch._AttentionBackendRegistry._backends) == len(dispatch.AttentionBackendName)


def test_all_layers_dense_is_the_model_itself() -> None:
    model = flux()
    before = answer(model, flux_inputs())
    assert D.swap(model, METHOD, min_length=64, dense_layers=[0, "single_transformer_blocks.0.attn"]).swapped == []
    assert torch.equal(answer(model, flux_inputs()), before)


def test_the_first_steps_of_every_run_are_dense() -> None:
    model = wan()
    exact = {step: answer(model, wan_inputs(step)) for step in (9.0, 5.0, 1.0)}
    report = D.swap(model, METHOD, min_length=64, dense_steps=2)
    for _ in range(2):  # two runs, in which guidance asks twice a step
        for step in (9.0, 9.0, 5.0, 5.0, 1.0, 1.0):
            same = torch.equal(answer(model, wan_inputs(step)), exact[step])
            assert same == (step > 1.0)
    assert reasons(report.served)["one of the first 2 steps"] == 2 * 4 * 2
    D.restore(model)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("where", ["config", "folder"])
def test_a_plan_gives_each_layer_its_method_and_travels(where: str, tmp_path: Path) -> None:
    model = flux()
    plan = ca.Plan({"transformer_blocks.0.attn": METHOD}, exact_below=64, host="diffusers", kind="self", length=288)
    report = D.swap(model, plan)
    assert report.swapped == ["transformer_blocks.0.attn"]
    assert [row.reason for row in report.rows if row.reason] == ["the plan does not name it"]
    planned = answer(model, flux_inputs())
    D.restore(model)
    assert [row.method for row in D.swap(model).rows] == ["auto", "auto"], "it brings no plan along"
    D.restore(model)
    if where == "config":
        plan.attach(model)
    model.save_pretrained(tmp_path)
    if where == "folder":
        plan.save(tmp_path)
    read = type(model).from_pretrained(tmp_path)
    assert D.swap(read).swapped == report.swapped
    assert torch.equal(answer(read, flux_inputs()), planned)
    with pytest.raises(ValueError, match="wanted a plan for diffusers; got one for transformers"):
        D.swap(model, ca.Plan(plan.layers, host="transformers"))


def test_a_plan_for_single_heads() -> None:
    model = flux()
    before = answer(model, flux_inputs())
    names = ("transformer_blocks.0.attn", "single_transformer_blocks.0.attn")
    D.swap(model, ca.Plan(dict.fromkeys(names, ("exact",) * 4)))
    assert torch.allclose(answer(model, flux_inputs()), before, atol=1e-6)
    D.swap(model, ca.Plan(dict.fromkeys(names, ("exact", METHOD, METHOD, "exact"))))
    assert not torch.allclose(answer(model, flux_inputs()), before, atol=1e-4)


def test_what_is_wrong_with_a_swap_is_said() -> None:
    with pytest.raises(ValueError, match="wanted a model whose attention goes through diffusers' dispatcher"):
        D.swap(torch.nn.Linear(2, 2), METHOD)
    with pytest.raises(TypeError, match="wanted a diffusers model"):
        D.swap("a pipeline", METHOD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wanted dense_layers by name"):
        D.swap(flux(), METHOD, dense_layers=[7])
    with pytest.raises(ValueError, match="wanted dense_steps a whole number"):
        D.swap(flux(), METHOD, dense_steps=-1)


@pytest.mark.parametrize(("make", "inputs"), [(wan, wan_inputs), (flux, flux_inputs)])
def test_a_compiled_model_is_one_graph(make: Callable[[], Any], inputs: Callable[[], dict[str, Any]]) -> None:
    model = make()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    D.swap(compiled, METHOD, min_length=64, dense_layers=[0], exact_rows=TEXT)
    assert torch.allclose(answer(compiled, inputs()), answer(model, inputs()), atol=1e-5)


def test_dense_steps_of_a_compiled_model() -> None:
    model = flux()
    exact = answer(model, flux_inputs(0.5))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    D.swap(compiled, METHOD, min_length=64, dense_steps=1)
    assert torch.allclose(answer(compiled, flux_inputs(0.5)), exact, atol=1e-5)
    answer(compiled, flux_inputs(0.25))
    assert torch.equal(answer(compiled, flux_inputs(0.125)), answer(model, flux_inputs(0.125)))
    assert not torch.allclose(answer(model, flux_inputs(0.5)), exact, atol=1e-5)


def test_a_swapped_model_trains() -> None:
    model = wan()
    D.swap(model, METHOD, min_length=64)
    model(**wan_inputs())[0].square().mean().backward()
    weight = model.blocks[0].attn1.to_q.weight
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


# ------------------------------------------------------------------------------------------------ two ranks


MODELS = {"wan": (wan, wan_inputs), "flux": (flux, flux_inputs)}
ULYSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": ("wan", {}),
    "wan, first rows exact": ("wan", {"exact_rows": 40}),
    "flux, text exact": ("flux", {"exact_rows": TEXT}),
}
HEADS = ca.Plan({"blocks.0.attn1": ("exact", METHOD, METHOD, "exact"), "blocks.1.attn1": METHOD})  # by head
RINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": ("wan", {}),
    "wan, first rows exact": ("wan", {"exact_rows": 300}),  # more than the first rank holds
    "wan, last rows exact": ("wan", {"exact_rows": -40}),
    "flux, text exact": ("flux", {"exact_rows": TEXT}),
}
MANY = "refined:clusters=256,top=256"  # every query its own cluster, every key near: exact


GRADIENTS = {
    "ulysses": ("ulysses_degree", METHOD, False),
    "ring": ("ring_degree", METHOD, False),
    "ring, merged": ("ring_degree", MANY, True),  # joint, and where its text ends is not known
}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Everything that two ranks are asked."""
    jobs: dict[str, Any] = {
        f"ulysses {case}": (model_over_ranks, (make, "ulysses_degree", METHOD, settings))
        for case, (make, settings) in ULYSSES.items()
    }
    jobs["ulysses by head"] = (model_over_ranks, ("wan", "ulysses_degree", HEADS, {}))
    for case, (make, settings) in RINGS.items():
        jobs[f"ring {case}"] = (model_over_ranks, (make, "ring_degree", METHOD, settings))
    jobs["ring flux"] = (model_over_ranks, ("flux", "ring_degree", METHOD, {}))
    jobs["ring exact"] = (model_over_ranks, ("wan", "ring_degree", METHOD, {"dense_layers": [0, 1]}))
    for case, given in GRADIENTS.items():
        jobs[f"gradients {case}"] = (gradients_over_ranks, given)
    return on_two_ranks(jobs, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", ULYSSES)
def test_ulysses_is_one_device_to_the_bit(case: str, split: dict[str, Tensor]) -> None:
    make, settings = ULYSSES[case]
    model, inputs = MODELS[make]
    alone = model()
    D.swap(alone, METHOD, min_length=64, **settings)
    assert torch.equal(split[f"ulysses {case}"], answer(alone, inputs()))


def test_ulysses_with_a_plan_for_single_heads(split: dict[str, Tensor]) -> None:
    alone = wan()
    D.swap(alone, HEADS, min_length=64)
    assert torch.equal(split["ulysses by head"], answer(alone, wan_inputs()))


def test_joint_models_are_those_whose_text_joins_self_attention() -> None:
    from diffusers import LTXVideoTransformer3DModel, QwenImageTransformer2DModel

    ltx = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        num_layers=1, caption_channels=8,
    )  # fmt: skip
    qwen = QwenImageTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    joint = {type(model): D._is_joint(model, D._layers(model)) for model in (wan(), flux(), ltx, qwen)}
    assert list(joint.values()) == [False, True, False, True]


def test_a_plan_for_other_heads_stays_exact() -> None:
    model = wan()
    before = answer(model, wan_inputs())
    report = D.swap(model, ca.Plan({"blocks.0.attn1": (METHOD, METHOD)}))
    assert torch.equal(answer(model, wan_inputs()), before)
    assert "the plan has no methods for 4 heads" in reasons(report.served)


@pytest.mark.parametrize("case", RINGS)
def test_a_ring_is_one_device(case: str, split: dict[str, Tensor]) -> None:
    """Over clusterattn.parallel, but for the order of summation."""
    make, settings = RINGS[case]
    model, inputs = MODELS[make]
    alone = model()
    exact = answer(alone, inputs())
    D.swap(alone, METHOD, min_length=64, **settings)
    wanted = answer(alone, inputs())
    off = (split[f"ring {case}"] - wanted).norm()
    assert off < 1e-5 * wanted.norm()
    assert off < 1e-3 * (wanted - exact).norm()


def test_a_ring_merges_parts_within_the_methods_own_error(split: dict[str, Tensor]) -> None:
    """Where it is not known in which order one device would have the tokens: a joint model's text and image."""
    alone = flux()
    exact = answer(alone, flux_inputs())
    D.swap(alone, METHOD, min_length=64)
    own_error = (answer(alone, flux_inputs()) - exact).norm()
    assert 0 < (split["ring flux"] - exact).norm() < own_error


def test_a_ring_of_exact_layers_is_exact(split: dict[str, Tensor]) -> None:
    assert torch.allclose(split["ring exact"], answer(wan(), wan_inputs()), atol=1e-5)


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_over_ranks(case: str, split: dict[str, Tensor]) -> None:
    """Those of one device; where parts are merged, which are not those of one device, with parts that are exact."""
    D.register(GRADIENTS[case][1], min_length=64)
    q, k, v = (x.requires_grad_() for x in qkv())
    weigh(ask(q=q, k=k, v=v), -1).backward()
    wanted = torch.stack([x.grad.chunk(2, 1)[0] for x in (q, k, v) if x.grad is not None])
    assert torch.allclose(split[f"gradients {case}"], wanted, atol=1e-5)
