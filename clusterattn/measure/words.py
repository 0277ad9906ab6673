"""Numbers as people read them."""

from __future__ import annotations


def human_number(value: float, sign: bool = False) -> str:
    """Four digits that matter: 12.34, 0.1234, 1.2e-05."""
    plus = "+" if sign else ""
    return f"{value:{plus}.4g}" if value == 0 or abs(value) >= 1e-4 else f"{value:{plus}.1e}"


def human_error(error: float) -> str:
    return f"{error:.4f}" if error >= 5e-4 else f"{error:.0e}" if error else "0"


def human_ratio(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio >= 0.1 else f"{ratio:.2g}×"


def human_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def human_bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def counted(number: int, word: str) -> str:
    """1 step, 2 steps."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
