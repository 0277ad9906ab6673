"""Choosing settings: the cheapest method for each layer of a model inside a tolerance (``ca.tune``); is it worth it on
this machine, and from which length (``ca.advise``)."""

from .advice import Advice, advise
from .search import tune

__all__ = ["Advice", "advise", "tune"]
