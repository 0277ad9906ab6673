"""Where conditioning rows are among the ranks of context parallelism, against tokens that are really shared out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clusterattn.hosts._parallel import layout

CPU = torch.device("cpu")


def over(ring: int, ulysses: int, rank: int) -> Any:
    return SimpleNamespace(ring_degree=ring, ulysses_degree=ulysses, _ring_local_rank=rank)


def exact_tokens(tokens: list[str], rows: int, joint: bool, parallel: Any) -> tuple[list[str], list[str]]:
    """The tokens in the order that a method sees, and those of them that are answered exactly."""
    found = layout(len(tokens), rows, joint, parallel, CPU)
    order = range(len(tokens)) if found.order is None else found.order.tolist()
    seen = [tokens[at] for at in order]
    if found.order is not None:
        assert found.back is not None
        assert [seen[at] for at in found.back.tolist()] == tokens, "everybody goes back to their place"
    assert [at for piece, _ in found.pieces for at in range(piece.start, piece.stop)] == list(range(len(tokens)))
    return seen, [seen[at] for piece, exact in found.pieces if exact for at in range(piece.start, piece.stop)]


def shared(stream: list[str], ranks: int) -> list[list[str]]:
    """As diffusers shares a stream out."""
    return [[stream[at] for at in part.tolist()] for part in torch.arange(len(stream)).tensor_split(ranks)]


@pytest.mark.parametrize("rows", [3, -3, 0, 40, -40])
def test_one_device(rows: int) -> None:
    tokens = [f"t{at}" for at in range(10)]
    seen, exact = exact_tokens(tokens, rows, False, None)
    assert seen == tokens
    assert exact == (tokens[:rows] if rows > 0 else tokens[rows:] if rows < 0 else [])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("text", "image"), [(4, 12), (6, 20), (5, 13), (1, 9)])
def test_ulysses_puts_the_streams_of_a_joint_model_together(text: int, image: int, first: bool) -> None:
    words, pixels = [f"w{at}" for at in range(text)], [f"p{at}" for at in range(image)]
    mine = zip(shared(words, 2), shared(pixels, 2), strict=True)
    joined = [token for w, p in mine for token in ([*w, *p] if first else [*p, *w])]
    seen, exact = exact_tokens(joined, text if first else -text, True, over(1, 2, 0))
    assert seen == ([*words, *pixels] if first else [*pixels, *words])
    assert exact == words


@pytest.mark.parametrize("rows", [5, -5, 12, -12])
def test_ulysses_keeps_the_order_of_one_stream(rows: int) -> None:
    tokens = [f"t{at}" for at in range(16)]
    seen, exact = exact_tokens(tokens, rows, False, over(1, 2, 0))
    assert seen == tokens
    assert exact == (tokens[:rows] if rows > 0 else tokens[rows:])


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("rows", [4, -4, 10, -10])
def test_a_ring_finds_every_row_once(rows: int, joint: bool) -> None:
    tokens = [f"t{at}" for at in range(16)]
    wanted = tokens[:rows] if rows > 0 else tokens[rows:]
    others = [token for token in tokens if token not in wanted]
    if joint:
        pairs = zip(shared(wanted, 2), shared(others, 2), strict=True)
        parts = [[*mine, *rest] if rows > 0 else [*rest, *mine] for mine, rest in pairs]
    else:
        parts = shared(tokens, 2)
    found = [exact_tokens(part, rows, joint, over(2, 1, rank))[1] for rank, part in enumerate(parts)]
    assert [token for part in found for token in part] == wanted


def test_both_at_once() -> None:
    words, pixels = [f"w{at}" for at in range(8)], [f"p{at}" for at in range(24)]
    parts = [[*w, *p] for w, p in zip(shared(words, 4), shared(pixels, 4), strict=True)]
    for rank in range(2):  # of the ring; Ulysses joins two parts
        seen, exact = exact_tokens([*parts[2 * rank], *parts[2 * rank + 1]], 8, True, over(2, 2, rank))
        assert exact == words[4 * rank : 4 * rank + 4]
        assert seen == [*exact, *pixels[12 * rank : 12 * rank + 12]]
