"""Train any model of ``models`` on any task of ``tasks``; the weights of the best judgement are kept."""

from .folder import load, save
from .loop import Fitted, fit, judge
from .settings import Settings

__all__ = ["Fitted", "Settings", "fit", "judge", "load", "save"]
