"""Look at what flows: every attention call of a model that a method serves or could serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from .._layer_call import LayerCall
from ..methods import Exact
from .register import NAME, STAMP, Stamp, by_config
from .swapping import FoundLayer, attach, find, make_stamp, plain, put_back


@contextmanager
def observe(model: nn.Module, fn: Callable[[str, LayerCall], None]) -> Iterator[None]:
    """Call ``fn(name, call)`` after each attention call that a method serves or could serve.

    The model may be swapped or not; answers do not change. Single tokens of decoding, packed documents and calls that
    have to stay exact (see the report of ``swap``) are not shown. ``call.answer(other)`` is what another method would
    have said.

    Args:
        model: a transformers model, swapped or not
        fn: called as ``fn(name, call)`` with the layer's name and a ``LayerCall``
    """
    model = plain(model)
    found = find(model)
    were = [getattr(each.module, STAMP, None) for each in found]
    stamps = [_stamp(each) for each in found]
    before = attach(model, found, [stamp if stamp.why_exact else replace(stamp, watch=fn) for stamp in stamps])
    try:
        yield
    finally:
        for each, was in zip(found, were, strict=True):
            setattr(each.module, STAMP, was) if was else delattr(each.module, STAMP)
        put_back(before)


def _stamp(each: FoundLayer) -> Stamp:
    """What serves the layer now."""
    already: Stamp | None = getattr(each.module, STAMP, None)
    if already is not None:
        return already
    if each.module.config._attn_implementation != NAME:
        return make_stamp(each, Exact(), 0)
    default = by_config(each.module)
    return make_stamp(each, default.method, default.exact_below)
