"""Tables of what goes beyond one call on one device: packed documents, many ranks, and TabPFN's own code."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import parallel
from table_words import NOT_YET, mark, origin, rows, spaced, table

import clusterattn as ca
from clusterattn.measure import Row
from clusterattn.measure.words import human_error

BY_FORMULA = ((1_000_000, 4), (1_000_000, 64), (10_000_000, 64))  # tokens, ranks: more than one machine can count
WAYS = ("ours", "ring", "all-gather", "Ulysses")


def varlen_table() -> str:
    """Packed documents beside a loop over them and a batch padded to the longest."""
    newest = {(row["method"], row["pass"]): row for row in rows("varlen")}
    if not newest:
        return NOT_YET
    found = list(newest.values())
    last = found[-1]
    slots = (
        f"{spaced(last['slots'])}, in {last['batches']} calls",
        f"{spaced(last['tokens'])}, in {last['documents']}",
        f"{spaced(last['padded_slots'])}, in one",
    )
    body = [("slots for the tokens", *slots)]
    for row in found:
        seconds = (f"{row['seconds'][way]:.2f} s" for way in ("varlen", "loop", "padded"))
        body.append((f"`{row['method']}`, {row['pass']}", *seconds))
    of = f"{last['documents']} documents of {last['shortest']} to {spaced(last['longest'])} tokens"
    equal = {row["method"]: row["documents_equal_to_the_bit"] for row in found}
    words = " and ".join(f"{count} (`{method}`)" for method, count in equal.items())
    agreed = f"{words} documents agree with the loop in every bit, the others to {max_of(found, 'difference')}"
    head = (f"{of}, {spaced(last['tokens'])} in all", "packed", "a loop", "padded to the longest")
    shape = f"{last['heads']} heads × {last['dim']}, {last['dtype']}"
    return table(head, body) + origin(found, str(last["clock"]), shape, agreed)


def max_of(found: list[Row], key: str) -> str:
    return human_error(max(float(row[key]) for row in found))


# ---- many ranks ----------------------------------------------------------------------------------


def parallel_table() -> str:
    """Megabytes that one rank sends in one layer: counted on processes, and by the formula that the counts hold."""
    newest = {(row["ranks"], row["n"], row["way"]): row for row in rows("parallel")}
    counted = sorted({(ranks, n) for ranks, n, _ in newest})
    if not counted:
        return NOT_YET
    found = list(newest.values())
    ours = newest[(*counted[0], "ours")]
    body = [_sent({way: newest[ranks, n, way] for way in WAYS}, "counted") for ranks, n in counted]
    body += [_sent(_formula(ours, n, ranks), "by formula") for n, ranks in BY_FORMULA]
    head = ("tokens", "ranks", "ours (forward alone)", "steps", "ring", "steps", "all-gather", "steps", "Ulysses")
    method = f"ours: `{ours['method']}`, {ours['calls']} collectives"
    apart = [row for row in found if "out" in row]
    proof = f"off by {max_of(apart, 'out')} from one process at most, gradients by {max_of(apart, 'gradients')}"
    shape = f"{ours['h']} heads × {ours['d']}, float32"
    return table((*head, "ours of ring's", ""), body) + origin(found, "megabytes", shape, method, proof)


def _formula(like: Row, n: int, ranks: int) -> dict[str, Row]:
    """What the rows would say of another length and more ranks."""
    layer = parallel.Layer(n, ranks, like["h"], like["d"], ca.method(like["method"]))
    forward, backward = layer.ours()
    sent = {"ours": (forward, forward + backward), **layer.peers()}
    steps = {"ours": like["steps"] // (like["ranks"] - 1) * (ranks - 1), "ring": 3 * ranks - 2}
    steps["all-gather"] = 3 * (ranks - 1)
    return {
        way: {
            "n": n,
            "ranks": ranks,
            "forward_bytes": first,
            "bytes": both,
            "steps": steps.get(way),
            "possible": layer.can(way),
            "of_ring": both / sent["ring"][1],
        }
        for way, (first, both) in sent.items()
    }


def _sent(ways: dict[str, Row], how: str) -> tuple[str, ...]:
    ours, *others = (ways[way] for way in WAYS)
    ring, gather, ulysses = (spaced(round(row["bytes"] / 1e6)) for row in others)
    part = ours["of_ring"]
    return (
        spaced(ours["n"]),
        str(ours["ranks"]),
        f"{ours['bytes'] / 1e6:.1f} ({ours['forward_bytes'] / 1e6:.1f})",
        spaced(ours["steps"]),
        *(ring, str(others[0]["steps"])),
        *(gather, str(others[1]["steps"])),
        ulysses if others[2]["possible"] else f"({ulysses})",
        f"{part:.0%}" if part > 0.2 else f"{part:.1%}",
        how,
    )


# ---- TabPFN --------------------------------------------------------------------------------------


def tabpfn_host_table() -> str:
    """TabPFN's own code with our backend in it, end to end."""
    newest = {row["rows"]: row for row in rows("tabpfn-rows")}
    if not newest:
        return NOT_YET
    found = [newest[count] for count in sorted(newest)]
    body = []
    for row in found:
        served = sum(count for kind, count in row["calls"].items() if not kind.startswith("fewer"))
        ratios = [1 / each for each in row["ratios"]]
        spread = f"{min(ratios):.2f} – {max(ratios):.2f}" if len(ratios) > 1 else "one turn"
        calls = f"{served} of {sum(row['calls'].values())}"
        body.append((spaced(row["rows"]), calls, f"{statistics.median(ratios):.2f}{mark(row)}", spread))
    head = ("train rows", "calls by clustering", "time, TabPFN's own = 1", "over turns")
    return table(head, body) + origin(found, f"`{found[0]['method']}`", f"{found[0]['weights']} weights, float32")


TABLES: dict[str, Callable[[], str]] = {
    "varlen": varlen_table,
    "parallel": parallel_table,
    "tabpfn-host": tabpfn_host_table,
}
