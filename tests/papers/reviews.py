"""Reviews that one word decides, for the tests on texts."""

from __future__ import annotations

import random


def reviews(count: int = 60, longest: int = 30) -> list[tuple[str, str]]:
    dice = random.Random(1)
    rest = ["film", "plot", "actor", "scene", "music", "end", "it", "was", "the"]
    made = []
    for at in range(count):
        label = ("bad", "good")[at % 2]
        words = dice.choices(rest, k=dice.randint(2, longest)) + [{"bad": "awful", "good": "lovely"}[label]] * 2
        dice.shuffle(words)
        made.append((" ".join(words), label))
    return made
