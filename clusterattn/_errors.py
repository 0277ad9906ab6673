"""One shape for every complaint to a caller: what was wanted, what came, what to try."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def complaint(wanted: str, got: str, advice: str) -> str:
    return f"wanted {wanted}; got {got}; try {advice}"


def bad_value(wanted: str, got: object, advice: str) -> ValueError:
    return ValueError(complaint(wanted, str(got), advice))


def bad_type(wanted: str, got: object, advice: str) -> TypeError:
    return TypeError(complaint(wanted, str(got), advice))


def check_whole(owner: str, **counts: int) -> None:
    """Each named setting is a whole number of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise bad_value(f"{owner}({name}=a whole number >= 1)", f"{name}={value!r}", f"{name}=1 or more")


def check_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise bad_value(f"{owner}({name}=one of {', '.join(choices)})", f"{name}={value!r}", f"{name}={choices[0]!r}")


def meant(word: str, choices: Iterable[str]) -> str | None:
    """The choice that a misspelt word comes closest to; None when it is like none of them."""
    return next(iter(difflib.get_close_matches(word.lower(), list(choices), n=1)), None)


def asked(word: str, choices: Iterable[str]) -> str:
    """A strange word as an error shows it: with the one that was probably meant."""
    near = meant(word, choices)
    return word if near is None else f"{word} (did you mean {near}?)"
