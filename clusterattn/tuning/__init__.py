"""Choosing settings: the cheapest method for each layer of a model inside a tolerance (``ca.tune``)."""

from .search import tune

__all__ = ["tune"]
