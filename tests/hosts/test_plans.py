"""Plans travel with their models: in a config, in a folder, and no further than they were made for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import clusterattn as ca

PLAN = ca.Plan({"layer": "refined:clusters=8,top=8"}, 16, host="transformers", kind="self", length=48)


def test_a_plan_knows_what_it_was_made_for(tmp_path: Path) -> None:
    path = PLAN.save(tmp_path / "plan.json")
    assert ca.Plan.load(path) == PLAN
    read = json.loads(path.read_text())
    assert (read["host"], read["kind"], read["length"]) == ("transformers", "self", 48)
    assert set(ca.Plan({}).to_dict()) == {"version", "exact_below", "layers", "note"}, "only what is known is written"
    with pytest.raises(ValueError, match="kind=one of"):
        ca.Plan({}, kind="both")
    with pytest.raises(ValueError, match="length=a whole number >= 1"):
        ca.Plan({}, length=0)
    with pytest.raises(TypeError, match="wanted host as a word"):
        ca.Plan({}, host=3)  # type: ignore[arg-type]


def test_a_folder_has_one_plan(tmp_path: Path) -> None:
    assert PLAN.save(tmp_path) == tmp_path / "clusterattn.json"
    assert ca.Plan.load(tmp_path) == PLAN


# ------------------------------------------------------------------------------------------------ transformers


def bert() -> tuple[torch.nn.Module, ca.Plan]:
    transformers = pytest.importorskip("transformers", reason='needs the extra "hf"')
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        initializer_range=0.5,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    names = list(ca.hf.layers(model))
    return model, dataclasses.replace(PLAN, layers={names[1]: ca.Refined(clusters=8, top=8)})


def hidden(model: torch.nn.Module) -> Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        out: Tensor = model(input_ids=torch.randint(0, 50, (2, 48))).last_hidden_state
    return out


@pytest.mark.parametrize("where", ["config", "folder"])
def test_swap_finds_the_plan_that_came_with_a_model(where: str, tmp_path: Path) -> None:
    model, plan = bert()
    exact = hidden(model)
    report = ca.hf.swap(model, plan)
    planned = hidden(model)
    assert not torch.allclose(planned, exact, atol=1e-4)
    if where == "config":
        plan.attach(model)
    model.save_pretrained(tmp_path)
    if where == "folder":
        plan.save(tmp_path)
    read = type(model).from_pretrained(tmp_path).eval()
    assert torch.allclose(hidden(read), exact, atol=1e-6), "nothing happens until it is swapped"
    assert ca.Plan.of(read) == plan
    assert ca.hf.swap(read) == report
    assert torch.equal(hidden(read), planned)


def test_a_model_without_a_plan_says_so() -> None:
    model, _ = bert()
    with pytest.raises(ValueError, match="wanted a method or a plan, or a model that brings its plan along"):
        ca.hf.swap(model)
    with pytest.raises(ValueError, match="wanted a model with a config"):
        PLAN.attach(torch.nn.Linear(2, 2))
    model.config.clusterattn = "refined"  # a method, not a plan
    with pytest.raises(ValueError, match="without a plan in its config"):
        ca.hf.swap(model)


def test_a_plan_in_a_config_waits_for_swap(caplog: pytest.LogCaptureFixture) -> None:
    model, plan = bert()
    exact = hidden(model)
    plan.attach(model)
    model.set_attn_implementation("clusterattn")
    assert torch.allclose(hidden(model), exact, atol=1e-5)
    assert "its config holds a plan" in caplog.text
    assert len(ca.hf.swap(model).swapped) == 1


def test_kinds_and_hosts_are_minded() -> None:
    model, plan = bert()
    report = ca.hf.swap(model, dataclasses.replace(plan, kind="cross"))
    assert report.swapped == []
    assert {row.reason for row in report.rows} == {"the plan does not name it", "the plan was made for cross-attention"}
    with pytest.raises(ValueError, match="wanted a plan for transformers; got one for diffusers"):
        ca.hf.swap(model, dataclasses.replace(plan, host="diffusers"))
    with pytest.raises(ValueError, match="wanted a plan for layers of this model"):
        ca.hf.swap(model, PLAN)
