"""Plans: written, read back, and refused with reasons."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import clusterattn as ca

PLAN = ca.Plan(
    {
        "layers.0.attn": ca.Refined(clusters=50, top=64),
        "layers.1.attn": [ca.Exact(), ca.Refined(clusters=25), ca.Smyrf(rounds=2)],
        "layers.2.attn": "improved:clusters=10",
    },
    exact_below=512,
    note={"tolerance": 0.02, "model": "mine"},
)


def test_methods_are_read_in_every_form() -> None:
    assert PLAN.layers["layers.1.attn"] == (ca.Exact(), ca.Refined(clusters=25), ca.Smyrf(rounds=2))
    assert PLAN.layers["layers.2.attn"] == ca.Improved(clusters=10)
    assert ca.Plan({"a": {"method": "local", "window": 8}}).layers["a"] == ca.Local(window=8)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    path = PLAN.save(tmp_path / "new" / "plan.json")
    assert ca.Plan.load(path) == PLAN
    assert ca.Plan.load(str(path)).to_dict() == PLAN.to_dict()
    read = json.loads(path.read_text())
    assert read["version"] == 1
    assert read["layers"]["layers.0.attn"]["clusters"] == 50
    assert [each.name for each in path.parent.iterdir()] == ["plan.json"], "no half-written file stays behind"


def test_every_setting_is_written_so_that_other_defaults_change_nothing() -> None:
    written = PLAN.to_dict()["layers"]["layers.0.attn"]
    assert set(written) == {"method", *(each.name for each in dataclasses.fields(ca.Refined))}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "wanted a plan of version 1; got version 2"),
        ({"version": None}, "got no version"),
        ({"layers": None}, "wanted layers as a dict"),
        ({"layers": {"a": "nothing"}}, "wanted a method: one of exact"),
        ({"layers": {"a": []}}, "wanted methods for the heads of a; got none"),
        ({"layers": {"a": {"method": "refined", "color": 3}}}, "wanted settings of Refined"),
        ({"exact_below": -1}, "wanted exact_below a whole number >= 0; got -1"),
        ({"exact_below": True}, "wanted exact_below a whole number >= 0; got True"),
        ({"note": "text"}, "wanted note as a dict"),
        ({"heads": 3}, "got also heads"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLAN.to_dict(), **change}))
    with pytest.raises((ValueError, TypeError), match=words) as said:
        ca.Plan.load(path)
    assert str(path) in str(said.value)


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text in ("{", "[]", '"refined"', '{"version": 1}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="wanted a plan"):
            ca.Plan.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="wanted a plan as JSON"):
        ca.Plan.load(path)
    with pytest.raises(FileNotFoundError):
        ca.Plan.load(tmp_path / "absent.json")


def test_without_transformers_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import clusterattn as ca\n"
        "try: ca.hf\n"
        "except ModuleNotFoundError as said: print(said)\n"
        "try: ca.nonsense\n"
        "except AttributeError as said: print(said)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [
        'transformers is not installed; clusterattn.hf needs it: pip install "clusterattn[hf]"',
        "module 'clusterattn' has no attribute 'nonsense'",
    ]


def test_a_star_names_all_other_layers() -> None:
    plan = ca.Plan({"*": "refined:clusters=9", "0.self_attn": "exact"}, exact_below=7)
    assert ca.Plan.from_dict(plan.to_dict()) == plan
    layers = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(3)))
    report = ca.nn.swap(layers, plan)
    assert [each.method for each in report.rows] == ["exact", *2 * [str(ca.Refined(clusters=9))]]
