"""The recipes: an explicit table, one file each."""

from __future__ import annotations

from typing import Any, Union

from .._errors import asked, bad_type, bad_value, meant
from .._types import Method
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

MethodSpec = Union[Method, str, dict[str, Any]]


def method(spec: MethodSpec) -> Method:
    """A method from itself, its name, ``"name:key=value,key=value"``, or the dict that ``to_dict`` made."""
    if isinstance(spec, Method):
        return spec
    if isinstance(spec, dict):
        return _named(str(spec.get("method"))).from_dict(spec)
    if not isinstance(spec, str):
        raise bad_type(
            "a method instance, its name or its dict", _what(spec), 'method="refined" or method=ca.Refined(...)'
        )
    name, _, settings = spec.partition(":")
    given = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        if not equals:
            raise bad_value("settings as key=value", repr(setting), f"{name}:{key.strip()}=...")
        given[key.strip()] = _value(value.strip())
    return _named(name.strip()).from_dict(given)


def _what(spec: object) -> str:
    return f"the class {spec.__name__}" if isinstance(spec, type) else type(spec).__name__


def _named(name: str) -> type[Method]:
    found = METHODS.get(name.lower().replace("-", "_"))
    if found is None:
        near = meant(name, METHODS) or "refined"
        raise bad_value(f"a method: one of {', '.join(METHODS)}", asked(name, METHODS), f'method="{near}"')
    return found


_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text.lstrip("+-").isdigit():
        return int(text)
    return float(text) if text.replace(".", "", 1).replace("e-", "", 1).isdigit() else text


__all__ = [
    "METHODS", "Clustered", "ClusterFormer", "ClusterFormerState", "Exact", "Improved", "Local", "Method", "MethodSpec",
    "OracleTop", "Refined", "Reformer", "Routing", "RoutingState", "Smyrf", "method",
]  # fmt: skip
