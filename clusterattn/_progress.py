"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Tick = Callable[[str, int], object]  # what is being done now, and of how many steps in all: each call is one more
Progress = Callable[[str, int, int], object]  # the same, and how many steps are done
