"""The recipes: an explicit table, one file each."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Union

import torch

from .._errors import asked, bad_type, bad_value, meant
from .._types import Method
from .auto import Auto
from .budgets import constant
from .clustered import Clustered
from .clusterformer import ClusterFormer, ClusterFormerState
from .exact import Exact
from .improved import Improved
from .local import Local
from .oracle_top import OracleTop
from .refined import Refined
from .reformer import Reformer
from .routing import Routing, RoutingState
from .smyrf import Smyrf

METHODS: dict[str, type[Method]] = {
    each.name: each
    for each in (Exact, Clustered, Improved, Refined, Smyrf, Reformer, Routing, ClusterFormer, OracleTop, Local)
}
"""Name -> class, for every method but Auto; a method of one's own is one entry more."""

MethodSpec = Union[Method, str, dict[str, Any]]


def method(spec: MethodSpec) -> Method:
    """A method from itself, its name, ``"name:key=value,key=value"``, or the dict that ``to_dict`` made.

    Args:
        spec: a method, its name, "name:key=value,...", or the dict of ``to_dict``
    """
    if isinstance(spec, Method):
        return spec
    if isinstance(spec, dict):
        return _named(str(spec.get("method"))).from_dict(spec)
    if not isinstance(spec, str):
        raise bad_type(
            "a method instance, its name or its dict", _what(spec), 'method="refined" or method=ca.Refined(...)'
        )
    if not torch.compiler.is_compiling():
        return _kept(spec)
    name, given = _read(spec)
    return _named(name)(**dict(given))


@lru_cache(maxsize=256)
def _kept(text: str) -> Method:
    name, given = _read(text)
    return _named(name)(**dict(given))


@constant
def _read(text: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The name of a method and the settings that are given in a text, checked."""
    name, _, settings = text.partition(":")
    given = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        if not equals:
            raise bad_value("settings as key=value", repr(setting), f"{name}:{key.strip()}=...")
        given[key.strip()] = _value(value.strip())
    found = _named(name.strip())
    found.from_dict(given)
    return found.name, tuple(given.items())


def _what(spec: object) -> str:
    return f"the class {spec.__name__}" if isinstance(spec, type) else type(spec).__name__


def _named(name: str) -> type[Method]:
    if name.lower() == Auto.name:  # not a recipe but a choice between two of them
        return Auto
    found = METHODS.get(name.lower().replace("-", "_"))
    if found is None:
        names = [*METHODS, Auto.name]
        near = meant(name, names) or "refined"
        raise bad_value(f"a method: one of {', '.join(names)}", asked(name, names), f'method="{near}"')
    return found


_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text.lstrip("+-").isdigit():
        return int(text)
    return float(text) if text.replace(".", "", 1).replace("e-", "", 1).isdigit() else text


__all__ = [
    "METHODS", "Auto", "Clustered", "ClusterFormer", "ClusterFormerState", "Exact", "Improved", "Local", "Method",
    "MethodSpec", "OracleTop", "Refined", "Reformer", "Routing", "RoutingState", "Smyrf", "method",
]  # fmt: skip
