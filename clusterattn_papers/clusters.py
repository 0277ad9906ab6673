"""The clusters of a pretrained model, by layer and head: do they persist over layers, do heads differ, what do they
hold? The questions that readers of clustered attention asked its authors, for any model and text.

Two groupings are compared by Hubert and Arabie's adjusted Rand index: 1 where they are the same, 0 where they agree no
more than chance does. Clusters need no common names for that, so all heads of all layers can be compared.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clusterattn import groups
from clusterattn._errors import bad_value
from clusterattn._extras import need
from clusterattn._layer_call import LayerCall
from clusterattn._progress import Tick
from clusterattn._rows import Row, environment
from clusterattn._types import Clusters, Method
from clusterattn.measure.tasks import Loaded, ModelBatch, ModelTask

# What a token is, for the question what clusters hold. The order is that of the classes.
KINDS = ("special", "punctuation", "number", "continuation", "short word", "word")
SHORT = 3  # letters of a short word: most are function words
MARKS = ("Ġ", "▁")  # of a word's beginning, in byte-level and SentencePiece vocabularies
FIGURES = {  # what is measured of each head: as the tables say it
    "again": "another draw",
    "used": "clusters",
    "largest": "largest",
    "token": "same token",
    "kind": "same kind",
    "looks": "same best key",
    "near": "distance",
}


@dataclass(frozen=True)
class Passage:
    """One sequence: its tokens, as text and as classes, and the cluster of each token in every head of every layer."""

    words: list[str]  # empty where the model does not read text
    token: Tensor | None  # (n) ids
    kind: Tensor | None  # (n) places in KINDS
    labels: Tensor  # (l h n)
    best: Tensor  # (l h n) the key that exact attention gives most weight


@dataclass(frozen=True)
class ClusterReport:
    """What was found. Heads are those of layers with as many queries as the first, in the order of the model.

    agreement   (l h l h): the mean adjusted Rand index between any two heads, each grouped from a draw of its own; on
                the diagonal a head with itself
    heads       figure -> (l h), the names being those of FIGURES
    passage     the first sequence, for pictures
    """

    layers: list[str]
    agreement: Tensor
    heads: dict[str, Tensor]
    passage: Passage
    about: Row
    left_out: list[str] = field(default_factory=list)  # layers that have other positions, or no clusters

    def within(self) -> Tensor:
        """(l) the mean agreement of two heads of a layer; nan where it has one head."""
        l, h = self.agreement.shape[:2]
        mine = self.agreement[torch.arange(l), :, torch.arange(l)]  # (l h h)
        return (mine.sum((1, 2)) - mine.diagonal(dim1=1, dim2=2).sum(1)) / (h * h - h if h > 1 else float("nan"))

    def across(self, apart: int = 1) -> Tensor:
        """(l - apart, h) how well the head of a later layer that fits best agrees with each head."""
        l = len(self.layers)
        return torch.stack([self.agreement[at, :, at + apart].amax(1) for at in range(l - apart)])

    def rows(self) -> list[Row]:
        """One for each head."""
        rows: list[Row] = []
        for at, name in enumerate(self.layers):
            for head in range(self.agreement.shape[1]):
                figures = {key: float(value[at, head]) for key, value in self.heads.items()}
                after = float(self.across()[at, head]) if at + 1 < len(self.layers) else None
                rows.append({"theme": "clusters", "layer": name, "head": head, **figures, "next": after, **self.about})
        return rows

    def findings(self) -> list[str]:
        """The three questions, answered in a sentence each."""
        again = float(self.heads["again"].mean())
        lines = [
            f"Grouped from another draw a head agrees with itself by {again:.2f} (1: the same clusters, 0: chance). "
            "More cannot be asked of two heads."
        ]

        def share(value: float) -> str:
            return f"{value:.2f}, {value / max(again, 1e-12):.0%} of that"

        if len(self.layers) > 1:
            far = len(self.layers) - 1
            after, last = (share(float(self.across(apart).mean())) for apart in (1, far))
            end = f"; the best of the last layer with the first's by {last}." if far > 1 else "."
            lines.append(
                f"Do they persist? The best fitting head of the next layer agrees by {after}; heads taken at random by "
                f"{_between(self.agreement, 1):.2f}{end}"
            )
        if self.agreement.shape[1] > 1:
            lines.append(f"Do heads differ? Two heads of one layer agree by {share(float(self.within().mean()))}.")
        held = {"token": "hold the same token", "kind": "are tokens of one kind", "looks": "look most at the same key"}
        phrases = [f"{words} {float(self.heads[key].mean()):.1f}" for key, words in held.items() if key in self.heads]
        lines.append(
            f"What do they hold? Two queries of a cluster {', '.join(phrases)} times as often as any two, and are "
            f"{float(self.heads['near'].mean()):.0%} as far apart."
        )
        return lines


def usual_clusters(length: int) -> int:
    """A cluster for every 20 tokens, from 4 to 100."""
    return min(max(length // 20, 4), 100)


def look(
    loaded: Loaded,
    task: ModelTask,
    batches: Sequence[ModelBatch],
    method: Method,
    *,
    only: str | None = None,
    tick: Tick | None = None,
) -> ClusterReport:
    """Group the queries of every head as ``method`` would, while the model runs with exact attention.

    The whole sequence is grouped at once, in causal models too: what is asked is which queries are alike.
    only   a regular expression: layers whose name it finds
    """
    if method.groups_type is not Clusters:
        raise bad_value(
            "a method that groups queries: clustered, improved or refined", method.name, "--method clustered"
        )
    try:
        wanted = re.compile(only or "")
    except re.error as error:
        raise bad_value("--layers, a regular expression", f"{only!r}: {error}", "--layers encoder") from None
    hf = need("clusterattn.hf", "hf")
    passages: list[Passage] = []
    again: list[Tensor] = []
    seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    left_out: dict[str, None] = {}

    def note(name: str, call: LayerCall) -> None:
        if not wanted.search(name):
            return
        if call.q.shape[2] != call.k.shape[2]:
            left_out[name] = None
            return
        seen[name] = _labels(call, method, 0), _labels(call, method, 1), _best_keys(call)

    for batch in batches:
        if tick is not None:
            tick("grouping", len(batches))
        seen.clear()
        with torch.no_grad(), hf.observe(loaded.model, note):
            task.answer(loaded, batch)
        if not seen:
            raise bad_value(
                "a layer of self-attention that a method could serve",
                f"none in {loaded.name}" + (f" that --layers {only!r} finds" if only else ""),
                "another model, or another --layers",
            )
        shape = next(iter(seen.values()))[0].shape
        left_out |= dict.fromkeys(name for name, found in seen.items() if found[0].shape != shape)
        kept = {name: found for name, found in seen.items() if name not in left_out}
        layers = list(kept)
        first, second, best = (torch.stack([found[i] for found in kept.values()], 1) for i in range(3))  # (b l h n)
        for at in range(len(first)):
            real = first[at, 0, 0] >= 0
            passages.append(
                Passage(*_words(loaded, batch, at, real), labels=first[at][..., real], best=best[at][..., real])
            )
            again.append(second[at][..., real])
    return _report(loaded, layers, passages, again, method, list(left_out))


def _labels(call: LayerCall, method: Method, seed: int) -> Tensor:
    """(b h n) the cluster of every query, -1 for padding."""
    found = groups(
        call.q,
        call.k,
        call.v,
        method=method,
        key_mask=call.key_mask,
        query_mask=call.query_mask,
        scale=call.scale,
        seed=seed,
    )
    assert isinstance(found, Clusters)
    labels = found.labels.cpu()
    real = call.query_mask if call.query_mask is not None else call.key_mask
    return labels if real is None else labels.masked_fill(~real[:, None].cpu(), -1)


def _best_keys(call: LayerCall) -> Tensor:
    """(b h n) the key of the largest logit; queries in portions, so that no (n m) matrix of a whole layer is made."""
    k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    m = k.shape[2]
    found = []
    for at, part in enumerate(torch.split(call.q, PORTION, 2)):
        logits = (part @ k.mT).float() * (1 if call.scale is None or call.scale > 0 else -1)
        if call.key_mask is not None:
            logits = logits.masked_fill(~call.key_mask[:, None, None], float("-inf"))
        if call.causal:
            row = at * PORTION + torch.arange(part.shape[2], device=k.device)
            logits = logits.masked_fill(torch.arange(m, device=k.device) > row.unsqueeze(1), float("-inf"))
        found.append(logits.argmax(-1))
    return torch.cat(found, 2).cpu()


PORTION = 512


def _words(loaded: Loaded, batch: ModelBatch, at: int, real: Tensor) -> tuple[list[str], Tensor | None, Tensor | None]:
    ids = batch.inputs.get("input_ids")
    if ids is None or ids.shape[1] != len(real) or not hasattr(loaded.processor, "convert_ids_to_tokens"):
        return [], None, None
    mine = ids[at].cpu()[real]
    words = [str(word) for word in loaded.processor.convert_ids_to_tokens(mine.tolist())]
    special = set(loaded.processor.all_special_tokens)
    marked = any(word.startswith(MARKS) for word in words)
    kinds = [KINDS.index(kind_of(word, word in special, marked)) for word in words]
    return words, mine, torch.tensor(kinds)


def kind_of(word: str, special: bool, marked: bool) -> str:
    """marked: words of this vocabulary begin with a sign; in others continuations do (BERT's ##)."""
    if special:
        return "special"
    bare = word.removeprefix("##").lstrip("".join(MARKS))
    if not any(letter.isalnum() for letter in bare):
        return "punctuation"
    if bare.isdigit():
        return "number"
    if word.startswith("##") or (marked and not word.startswith(MARKS)):
        return "continuation"
    return "short word" if len(bare) <= SHORT else "word"


# ---------------------------------------------------------------------------------------------------- figures


def adjusted_rand(one: Tensor, other: Tensor) -> Tensor:
    """(a b) the adjusted Rand index of each of ``one`` (a n) with each of ``other`` (b n), labels from 0 on."""
    n = one.shape[-1]
    first, second = (_members(each) for each in (one, other))  # (a c n), (b c n)
    both = torch.stack([_pairs((each @ second.mT).flatten(1), n) for each in first])  # (a b), of counts n_ij
    mine, theirs = (_pairs(each.sum(-1), n) for each in (first, second))
    chance = mine[:, None] * theirs / max(n * (n - 1) / 2, 1)
    most = (mine[:, None] + theirs) / 2
    return torch.where(most == chance, 1.0, (both - chance) / (most - chance).clamp_min(1e-12))


def _members(labels: Tensor) -> Tensor:
    """(a n) -> (a c n), 1 where a token is in the cluster."""
    return (labels.unsqueeze(1) == torch.arange(int(labels.max()) + 1).unsqueeze(-1)).float()


def _pairs(counts: Tensor, n: int) -> Tensor:
    """Pairs of tokens that share a class, from the sizes of the classes (… c) of n tokens."""
    return (counts.double().square().sum(-1) - n) / 2


def oftener(labels: Tensor, classes: Tensor) -> Tensor:
    """(a): how many times as often two tokens of a cluster are of one class as any two tokens are. 1: the clusters
    know nothing of the classes. labels (a n), classes (n) or (a n); nan where no two tokens are of one class."""
    n = labels.shape[-1]
    classes = classes.expand_as(labels)

    def pairs(codes: Tensor) -> Tensor:
        return torch.stack([_pairs(each.unique(return_counts=True)[1], n) for each in codes])

    both = pairs(labels * (int(classes.max()) + 1) + classes)
    return (both / pairs(labels)) / (pairs(classes) / (n * (n - 1) / 2))


def nearness(labels: Tensor) -> Tensor:
    """(a): the mean distance in the text of two tokens of a cluster, any two tokens being 1 apart."""
    n = labels.shape[-1]
    place = torch.arange(n).double()
    members = _members(labels).double()  # (a c n)
    # Σ over pairs |i - j| = Σ over members i, in order, of i · (members before it - members after it)
    before = members.cumsum(-1) - members
    after = members.sum(-1, keepdim=True) - members - before
    total = (members * place * (before - after)).sum((-1, -2))
    return total / _pairs(members.sum(-1), n).clamp_min(1e-12) / ((n + 1) / 3)


def _report(
    loaded: Loaded, layers: list[str], passages: list[Passage], again: list[Tensor], method: Method, left_out: list[str]
) -> ClusterReport:
    l, h, _ = passages[0].labels.shape
    agreement = torch.zeros(l * h, l * h, dtype=torch.float64)
    sums: dict[str, list[Tensor]] = {}
    for passage, other in zip(passages, again, strict=True):
        labels = passage.labels.flatten(0, 1)
        sizes = _members(labels).sum(-1)
        # All heads of a call share their draws, so heads are compared across two draws: else they agree for that alone.
        across = adjusted_rand(labels, other.flatten(0, 1))
        agreement += (across + across.T) / 2 / len(passages)
        found = {
            "again": across.diagonal(),
            "used": (sizes > 0).sum(-1).double(),
            "largest": sizes.amax(-1) / labels.shape[-1],
            "looks": oftener(labels, passage.best.flatten(0, 1)),
            "near": nearness(labels),
        }
        classes: Mapping[str, Tensor | None] = {"token": passage.token, "kind": passage.kind}
        found |= {name: oftener(labels, each) for name, each in classes.items() if each is not None}
        for name, value in found.items():
            sums.setdefault(name, []).append(value)
    heads = {name: torch.stack(sums[name]).nanmean(0).view(l, h) for name in FIGURES if name in sums}
    about: Row = {
        "model": loaded.name,
        "method": str(method),
        "sequences": len(passages),
        "tokens": sum(each.labels.shape[-1] for each in passages),
        "environment": environment(loaded.device),
    }
    return ClusterReport(layers, agreement.view(l, h, l, h), heads, passages[0], about, left_out)


def _between(agreement: Tensor, apart: int) -> float:
    """The mean agreement of two heads that are so many layers apart."""
    l = agreement.shape[0]
    return float(torch.stack([agreement[at, :, at + apart] for at in range(l - apart)]).mean())


def contents(passage: Passage, layer: int, head: int, most: int = 12) -> list[tuple[int, list[str]]]:
    """The clusters of a head, the largest first: how many tokens, and which, the commonest first."""
    found = []
    labels = passage.labels[layer, head].tolist()
    pairs = sorted(zip(labels, passage.words, strict=True))
    for _, members in itertools.groupby(pairs, key=lambda pair: pair[0]):
        words = [word for _, word in members]
        ordered = sorted(dict.fromkeys(words), key=words.count, reverse=True)
        times = {word: f" ×{words.count(word)}" if words.count(word) > 1 else "" for word in ordered}
        found.append((len(words), [word + times[word] for word in ordered]))
    return sorted(found, key=lambda each: -each[0])[:most]


def typical(report: ClusterReport) -> tuple[int, int]:
    """The layer in the middle, and there the head whose clusters hold one kind of token in the median."""
    key = "kind" if "kind" in report.heads else "near"
    layer = len(report.layers) // 2
    order = report.heads[key][layer].argsort()
    return layer, int(order[(len(order) - 1) // 2])
