"""What the papers train, on the library's own layers, with any method."""

from ._parts import Answer, Positions, Stack, attending_with, attentions, mean_over

__all__ = ["Answer", "Positions", "Stack", "attending_with", "attentions", "mean_over"]
