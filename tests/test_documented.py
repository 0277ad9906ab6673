"""Every public name says what it is, and what each of its parameters means; and mypy knows what attention returns."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

import clusterattn as ca

MODULES = ("", "nn", "hf", "hosts", "hosts.tabpfn", "hosts.diffusers", "hosts.vggt", "parallel", "measure", "tuning")
SECTIONS = re.compile(r"^(?:Args|Attributes):\n((?:(?:    .*)?\n)+)", re.MULTILINE)
NAMED = re.compile(r"^    (\*{0,2}\w+):", re.MULTILINE)


def told(text: str | None) -> set[str]:
    """The parameters that a docstring explains."""
    sections = SECTIONS.findall(inspect.cleandoc(text or "") + "\n")
    return {name.lstrip("*") for section in sections for name in NAMED.findall(section)}


def asked(function: Any) -> list[str]:
    """The parameters that a caller may give."""
    names = list(inspect.signature(function).parameters)
    return [name for name in names if name not in ("self", "cls")]


def ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("clusterattn")


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods that a class of ours defines, itself or by a base of ours."""
    found = {name: value for each in reversed(kind.__mro__) for name, value in vars(each).items()}
    for name, value in found.items():
        value = getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(value) and ours(value):
            yield name, value


def public() -> dict[str, Any]:
    """Every public name with what it stands for."""
    found: dict[str, Any] = {}
    for path in MODULES:
        module = importlib.import_module(f"clusterattn.{path}" if path else "clusterattn")
        for name in module.__all__:
            found[f"ca.{path}.{name}" if path else f"ca.{name}"] = getattr(module, name)
    return found


NAMES = public()


def constants(module: Any) -> set[str]:
    """Those that a string stands below, which is their docstring."""
    body = ast.parse(inspect.getsource(module)).body
    said = set()
    for statement, following in itertools.pairwise(body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            said |= {each.id for each in targets if isinstance(each, ast.Name)}
    return said


HOMES = {"METHODS": "clusterattn.methods", "COMMITMENT": "clusterattn.nn.decoder", "NAME": "clusterattn.hf.register"}
HOMES |= {"Row": "clusterattn._rows"}


@pytest.mark.parametrize("path", [path for path, value in NAMES.items() if not path.endswith("__version__")])
def test_a_public_name_is_documented(path: str) -> None:
    value, name = NAMES[path], path.rpartition(".")[2]
    if inspect.isclass(value):
        chain = [each for each in value.__mro__ if ours(each)]
        known = set().union(*(told(each.__doc__) | told(vars(each).get("__init__", each).__doc__) for each in chain))
        fields = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        wanted = fields or ([] if value.__init__ is object.__init__ else asked(value.__init__))
        assert inspect.cleandoc(vars(value).get("__doc__") or "").strip(), f"{path} has no docstring"
        assert [each for each in wanted if each not in known] == [], path
        for method, function in members(value):
            assert inspect.getdoc(getattr(value, method)), f"{path}.{method} has no docstring"
            inherited = set().union(*(told(getattr(vars(each).get(method), "__doc__", None)) for each in chain))
            inherited |= told(inspect.getdoc(getattr(value, method)))
            assert [each for each in asked(function) if each not in inherited] == [], f"{path}.{method}"
        for each, found in vars(value).items():
            if isinstance(found, property) and not each.startswith("_"):
                assert found.__doc__, f"{path}.{each} has no docstring"
    elif inspect.ismodule(value):
        assert value.__doc__, path
    elif inspect.isfunction(value):
        assert value.__doc__, path
        assert [each for each in asked(value) if each not in told(value.__doc__)] == [], path
    else:
        assert name in constants(importlib.import_module(HOMES[name])), f"{path} has no docstring below it"


def test_dir_shows_what_there_is() -> None:
    assert set(dir(ca)) >= {
        "attention",
        "groups",
        "Refined",
        "nn",
        "hf",
        "hosts",
        "parallel",
        "measure",
        "tune",
        "Plan",
    }
    assert not [name for name in dir(ca) if name.startswith("_") and name != "__version__"]
    assert sorted(dir(ca.hosts)) == ["diffusers", "tabpfn", "vggt"]


# ---- types ---------------------------------------------------------------------------------------

TYPED = """
import torch
import clusterattn as ca

q = torch.randn(1, 1, 4, 4)
reveal_type(ca.attention(q, q, q))
reveal_type(ca.attention(q, q, q, method="exact", causal=True))
reveal_type(ca.attention(q, q, q, return_lse=True))
reveal_type(ca.attention(q, q, q, return_state=True))
reveal_type(ca.attention(q, q, q, return_lse=True, return_state=True))
ca.attention(q, q, q, is_causal=True)
"""


def test_a_type_checker_knows_what_attention_returns(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "typed.py").write_text(TYPED)
    words = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent", str(tmp_path / "typed.py")]
    says = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600).stdout
    shown = re.findall(r'Revealed type is "(.*)"', says.replace("torch._tensor.", "").replace("builtins.", ""))
    one, lse, state, both = "Tensor", "tuple[Tensor, Tensor]", "tuple[Tensor, Any]", "tuple[Tensor, Tensor, Any]"
    assert shown == [one, one, lse, state, both], says
    assert "typed.py:11: error" in says  # SDPA's word


def test_the_typed_options_are_those_of_the_call() -> None:
    from clusterattn._options import AttentionOptions

    apart = {"q", "k", "v", "return_lse", "return_state", "torchs"}
    assert set(AttentionOptions.__annotations__) == set(asked(ca.attention)) - apart
