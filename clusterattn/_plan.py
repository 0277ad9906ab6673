"""A plan: which method serves which layer of a model. Made by ``ca.tune`` or by hand, kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

from ._errors import bad_type, bad_value
from ._files import write_whole
from ._types import Method
from .methods import method as as_method

VERSION = 1

LayerPlan = Union[Method, tuple[Method, ...]]  # one method for all heads, or one for each query head


@dataclass(frozen=True)
class Plan:
    """Methods by layer.

    layers       the layer's name in ``model.named_modules()`` -> a method, or one method for each query head. Short
                 forms are read: ``{"encoder.layer.0.attention.self": "refined:clusters=50"}``. Layers that are not
                 named stay exact
    exact_below  shorter sequences use exact attention
    note         what the maker wants to remember: tolerance, measured error, share of the cost, the model's name
    """

    layers: Mapping[str, LayerPlan]
    exact_below: int = 0
    note: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping):
            raise bad_type(
                "layers as a dict: name -> method", type(self.layers).__name__, 'Plan(layers={"...": "refined"})'
            )
        object.__setattr__(self, "layers", {str(name): _layer(name, given) for name, given in self.layers.items()})
        check_exact_below(self.exact_below)
        if not isinstance(self.note, dict):
            raise bad_type("note as a dict", type(self.note).__name__, 'note={"tolerance": 0.02}')

    # ------------------------------------------------------------------ as JSON

    def to_dict(self) -> dict[str, Any]:
        layers = {
            name: given.to_dict() if isinstance(given, Method) else [each.to_dict() for each in given]
            for name, given in self.layers.items()
        }
        return {"version": VERSION, "exact_below": self.exact_below, "layers": layers, "note": self.note}

    @classmethod
    def from_dict(cls, read: Mapping[str, Any]) -> Plan:
        version = read.get("version") if isinstance(read, Mapping) else None
        if version != VERSION:
            got = "no version" if version is None else f"version {version!r}"
            raise bad_value(f"a plan of version {VERSION}", got, "a file that Plan.save wrote, or a newer clusterattn")
        strange = sorted(set(read) - {"version", "exact_below", "layers", "note"})
        if strange or "layers" not in read:
            got = f"also {', '.join(strange)}" if strange else "no layers"
            raise bad_value("a plan with version, layers, exact_below and note", got, "a file that Plan.save wrote")
        return cls(read["layers"], read.get("exact_below", 0), read.get("note") or {})

    def save(self, path: str | Path) -> Path:
        """Write the plan; nobody ever sees half of it."""
        return write_whole(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as wrong:  # not JSON, or not even text
            raise bad_value("a plan as JSON", f"{path}: {wrong}", "a file that Plan.save wrote") from None
        try:
            return cls.from_dict(read)
        except (TypeError, ValueError) as wrong:
            raise type(wrong)(f"{path}: {wrong}") from None


def check_exact_below(length: int) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise bad_value("exact_below a whole number >= 0", repr(length), "exact_below=512")


def _layer(name: object, given: Any) -> LayerPlan:
    if not isinstance(given, (list, tuple)):
        return as_method(given)
    if not given:
        raise bad_value(f"methods for the heads of {name}", "none", "one method, or one for each query head")
    return tuple(as_method(each) for each in given)
