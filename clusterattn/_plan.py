"""A plan: which method serves which layer of a model. Made by ``ca.tune`` or by hand, kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Union

from ._errors import bad_type, bad_value, check_choice, check_whole
from ._files import write_whole
from ._types import Method
from .methods import MethodSpec
from .methods import method as as_method

VERSION = 1
FILE = "clusterattn.json"  # a plan's name in a model's folder
KINDS = ("", "self", "cross")
EVERY = "*"  # in the place of a layer's name: every layer that is not named

LayerPlan = Union[Method, tuple[Method, ...]]  # one method for all heads, or one for each query head


@dataclass(frozen=True)
class Plan:
    """Methods by layer.

    Args:
        layers: the layer's name in ``model.named_modules()`` -> a method, or one method for each query head. Short
            forms are read: ``{"encoder.layer.0.attention.self": "refined:clusters=50"}``. Layers that are not named
            stay exact, unless ``"*"`` names the method of all others
        exact_below: shorter sequences use exact attention
        note: what the maker wants to remember: tolerance, measured error, share of the cost, the model's name
        host: whose model it was made for: "transformers", "diffusers", "vggt", "torch"; another refuses it. "": any
        kind: of the calls that it was made for: "self", "cross"; layers of the other kind stay exact. "": both
        length: of the sequences that it was made for, in tokens; None: not known

    A plan travels with its model: ``plan.save(folder)`` puts it beside the weights, ``plan.attach(model)`` into the
    config that ``model.save_pretrained`` writes; ``swap(model)`` without a method finds it in either.
    """

    layers: Mapping[str, LayerPlan]
    exact_below: int = 0
    note: dict[str, Any] = field(default_factory=dict)
    host: str = ""
    kind: str = ""
    length: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping):
            raise bad_type(
                "layers as a dict: name -> method", type(self.layers).__name__, 'Plan(layers={"...": "refined"})'
            )
        object.__setattr__(self, "layers", {str(name): _layer(name, given) for name, given in self.layers.items()})
        check_exact_below(self.exact_below)
        if not isinstance(self.note, dict):
            raise bad_type("note as a dict", type(self.note).__name__, 'note={"tolerance": 0.02}')
        if not isinstance(self.host, str):
            raise bad_type("host as a word", type(self.host).__name__, 'host="transformers"')
        check_choice("Plan", "kind", self.kind, KINDS)
        if self.length is not None:
            check_whole("Plan", length=self.length)

    # ------------------------------------------------------------------ as JSON

    def to_dict(self) -> dict[str, Any]:
        """As plain values: for JSON."""
        layers = {
            name: given.to_dict() if isinstance(given, Method) else [each.to_dict() for each in given]
            for name, given in self.layers.items()
        }
        made_for = {name: getattr(self, name) for name in MADE_FOR if getattr(self, name)}
        return {"version": VERSION, "exact_below": self.exact_below, **made_for, "layers": layers, "note": self.note}

    @classmethod
    def from_dict(cls, read: Mapping[str, Any]) -> Plan:
        """The plan back from ``to_dict``.

        Args:
            read: what ``to_dict`` gave
        """
        version = read.get("version") if isinstance(read, Mapping) else None
        if version != VERSION:
            got = "no version" if version is None else f"version {version!r}"
            raise bad_value(f"a plan of version {VERSION}", got, "a file that Plan.save wrote, or a newer clusterattn")
        strange = sorted(set(read) - {"version", "exact_below", "layers", "note", *MADE_FOR})
        if strange or "layers" not in read:
            got = f"also {', '.join(strange)}" if strange else "no layers"
            raise bad_value("a plan with version, layers, exact_below and note", got, "a file that Plan.save wrote")
        made_for = {name: read[name] for name in MADE_FOR if name in read}
        return cls(read["layers"], read.get("exact_below", 0), read.get("note") or {}, **made_for)

    def save(self, path: str | Path) -> Path:
        """Write the plan, under its usual name if ``path`` is a folder; nobody ever sees half of it.

        Args:
            path: a file, or the folder of a model
        """
        return write_whole(_file(path), json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from its file, or from the folder of the model it was saved with.

        Args:
            path: a file, or the folder of a model
        """
        path = _file(path)
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as wrong:  # not JSON, or not even text
            raise bad_value("a plan as JSON", f"{path}: {wrong}", "a file that Plan.save wrote") from None
        try:
            return cls.from_dict(read)
        except (TypeError, ValueError) as wrong:
            raise type(wrong)(f"{path}: {wrong}") from None

    # ------------------------------------------------------------------ with its model

    def attach(self, model: Any) -> None:
        """Put the plan into the model's config: ``model.save_pretrained`` writes it, ``from_pretrained`` reads it.

        Args:
            model: a model with a config
        """
        config = getattr(model, "config", None)
        if hasattr(model, "register_to_config"):  # diffusers, whose configs are frozen
            model.register_to_config(clusterattn=self.to_dict())
        elif config is not None and not isinstance(config, Mapping):
            config.clusterattn = self.to_dict()
        else:
            got = f"{type(model).__name__} without one"
            raise bad_value("a model with a config", got, "plan.save(folder), and Plan.load(folder) when it is read")

    @classmethod
    def of(cls, model: Any) -> Plan | None:
        """The plan that came with a model, in its config or in the folder it was read from; None: there is none.

        Args:
            model: a model, as it was loaded
        """
        config = getattr(model, "config", None)
        known = config if isinstance(config, Mapping) else vars(config) if hasattr(config, "__dict__") else {}
        held, folder = known.get("clusterattn"), known.get("_name_or_path")
        if isinstance(held, Mapping) and is_plan(held):
            return cls.from_dict(held)
        return cls.load(folder) if folder and (Path(folder) / FILE).is_file() else None

    def for_host(self, host: str) -> Plan:
        """The plan itself, refused if it was made for models of another host.

        Args:
            host: "transformers", "diffusers", "vggt" or "torch"
        """
        if self.host not in ("", host):
            raise bad_value(f"a plan for {host}", f"one for {self.host}", f"swap of {self.host}'s models")
        return self


MADE_FOR = ("host", "kind", "length")


def is_plan(held: object) -> bool:
    """Is this, from a config, the dict of a plan (and not a method's)?"""
    return isinstance(held, Mapping) and "layers" in held


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path / FILE if path.is_dir() else path


class Chosen(NamedTuple):
    """What a swap puts where."""

    layers: dict[str, LayerPlan]
    exact_below: int
    kind: str = ""  # of the calls that a plan was made for
    planned: bool = False  # by a plan

    def why_exact(self, name: str, cross: bool) -> str:
        """Why a layer stays exact if nothing else keeps it; "" where it does not."""
        if name not in self.layers:
            return "the plan does not name it"
        made_for_other = self.kind == ("self" if cross else "cross")
        return f"the plan was made for {self.kind}-attention" if made_for_other else ""


def choose(
    method: MethodSpec | Plan | None,
    model: Any,
    host: str,
    names: Sequence[str],
    exact_below: int | None,
    usual: tuple[MethodSpec | None, int] = (None, 0),
) -> Chosen:
    """A method for all layers of these names, or a plan's methods for those that it names.

    Args:
        method: None: the plan that came with the model, or else the usual method of the host, if it has one
        exact_below: None: as the plan says, or the usual number for a method
    """
    method = (Plan.of(model) or usual[0]) if method is None else method
    if method is None:
        raise bad_value(
            "a method or a plan, or a model that brings its plan along",
            f"{type(model).__name__} without a plan in its config or its folder",
            'method="refined", or plan.save(folder) beside the weights',
        )
    if isinstance(method, Plan):
        chosen = Chosen(_named(method.for_host(host), names), method.exact_below, method.kind, planned=True)
    else:
        chosen = Chosen(dict.fromkeys(names, as_method(method)), usual[1])
    for each in chosen.layers.values():
        check_stateless(each)
    below = chosen.exact_below if exact_below is None else exact_below
    check_exact_below(below)
    return chosen._replace(exact_below=below)


def _named(plan: Plan, names: Sequence[str]) -> dict[str, LayerPlan]:
    """The plan's methods under a model's names: a model with a head and the same without one share a plan."""
    wanted: dict[str, LayerPlan] = {}
    for planned, method in plan.layers.items():
        if planned == EVERY:
            continue
        alike = [name for name in names if name == planned]
        alike = alike or [name for name in names if name.endswith("." + planned) or planned.endswith("." + name)]
        if len(alike) != 1:
            known = f"{', '.join(names[:3])}, ..."
            raise bad_value(f"a plan for layers of this model: {known}", repr(planned), "one of these names")
        wanted[alike[0]] = method
    others = dict.fromkeys(names, plan.layers[EVERY]) if EVERY in plan.layers else {}
    return {**others, **wanted}


def check_stateless(given: LayerPlan) -> None:
    """Refuse settings that would be dropped where methods keep no state from layer to layer and no losses."""
    for each in (given,) if isinstance(given, Method) else given:
        if lost := each.through_state():
            advice = "nn.ClusterFormerEncoder or nn.Decoder, which have both, or leaving them out"
            wanted = f"settings of {type(each).__name__} that act without trained centroids and losses"
            raise bad_value(wanted, ", ".join(lost), advice)


def check_exact_below(length: int) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise bad_value("exact_below a whole number >= 0", repr(length), "exact_below=512")


def _layer(name: object, given: Any) -> LayerPlan:
    if not isinstance(given, (list, tuple)):
        return as_method(given)
    if not given:
        raise bad_value(f"methods for the heads of {name}", "none", "one method, or one for each query head")
    return tuple(as_method(each) for each in given)
