"""Tables of single calls: closeness on the embedded samples, time and memory by length, error beside every speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from table_models import sample_rows
from table_words import (
    NOT_YET,
    commit_of,
    is_former,
    machine,
    mark,
    newest_run,
    no_times,
    origin,
    percent,
    rows,
    spaced,
    table,
    time_of,
)

from clusterattn.measure import Row
from clusterattn.measure.bench import PASSES
from clusterattn.measure.speed_table import HEAD, KEYS, any_of, cells, failures, joined, ordered
from clusterattn.measure.words import human_bytes, human_error, human_ratio

CROSSINGS, GPU = "img/crossings.png", "gpu-bars"
HOST_LENGTHS = (8192, 32768)
SAMPLES = {"compare": "MiniLM-L6 reading a book", "compare-long": "TabPFN v1 over a table"}


def compare_table(theme: str) -> Callable[[], str]:
    """Every method on one of the embedded samples."""

    def made() -> str:
        found = [row for row in newest_run(theme) if row["budget"] == 1] if rows(theme) else []
        if not found:
            return NOT_YET
        dense = found[0]["row_l1"] is not None  # on a long sample the weights are too many to lay out
        cost = ("multiply-adds, of exact's", "time, exact = 1", "memory, exact = 1")
        body = [
            (
                f"`{row['method']}`",
                human_error(row["error"]),
                *([human_error(row["row_l1"])] if dense else []),
                percent(row["cost_share"], row),
                f"{1 / row['speedup']:.2f}",
                f"{row['memory_share']:.1f}",
            )
            for row in sorted(found, key=lambda row: float(row["error"]))
        ]
        milliseconds = found[0]["seconds"] * 1e3
        head = ("method", "output error", *(["row L1"] if dense else []), *cost)
        return table(head, body) + origin(found, f"exact takes {milliseconds:.1f} ms")

    return made


# ---- who should use it ---------------------------------------------------------------------------


def box() -> str:
    """Refined as it comes: where it was measured, how far off it is, how long it takes beside exact attention."""
    lines: list[tuple[Row, int, float, str, str]] = []  # row, length, time, error, data
    for row in sample_rows():
        lines.append((row, row["n"], 1 / row["speedup"], human_error(row["error"]), SAMPLES[row["theme"]]))
    for row in default_speeds():
        error = "–" if row.get("error") is None else human_error(row["error"])
        data = f"{data_of(row)}, {row['h']} × {row['d']}{', causal' * row['causal']}"
        lines.append((row, row["n"], eager_time(row) or 1 / row["speedup"], error, data))  # as people call it
    for row in rows("tabpfn"):
        if row["method"] == "refined/exact" and row.get("device") == "cuda":
            lost = 100 * (row.get("accuracy") or 0) - 100 * (row.get("exact_accuracy") or 0)
            told = "time alone" if row.get("kl") is None else f"KL {row['kl']:.4f}, {lost:+.1f} points"
            lines.append((row, row["rows"], row["seconds"] / row["exact_seconds"], told, "TabPFN v1, the whole model"))
    newest = {(machine(row), data, n): line for line in lines for row, n, _, _, data in [line]}
    if not newest:
        return NOT_YET
    body = [
        (where, data, spaced(n), error, (f"**{time:.2f}**" if time < 1 else f"{time:.2f}") + mark(row))
        for (where, data, n), (row, _, time, error, _) in sorted(newest.items(), key=lambda item: item[0])
    ]
    head = ("device", "data", "length", "output error", "time, exact = 1")
    found = [line[0] for line in newest.values()]
    made_up = dict.fromkeys(str(row["data"]) for row in found if "ixture" in str(row.get("data")))
    return table(head, body, words=2) + origin(found, "forward, `refined` as it comes", *made_up)


def data_of(row: Row) -> str:
    """What a call was timed on, in a few words."""
    told = str(row.get("data", ""))
    if "ixture" in told:
        return "a mixture of Gaussians"
    return "heads of TabPFN v1, repeated" if "TabPFN" in told else told.partition(",")[0]


COMMON = (8192, 32768)


def default_speeds() -> list[Row]:
    """Forward times of Refined() for each machine and kind: the shortest length, the longest, where it overtakes, and
    two that many models have; where they are few, all."""
    kinds: dict[tuple[object, ...], dict[int, Row]] = {}
    for row in [*rows("cpu-bars", "bench"), *gpu_rows()]:
        if row.get("method") == "refined" and row.get("pass") == "forward" and _is_speed(row) and "speedup" in row:
            row = {**row, "error": error_of([row], row["n"])}
            kinds.setdefault((machine(row), data_of(row), row["h"], row["d"], row["causal"]), {})[row["n"]] = row
    shown = []
    for by_length in kinds.values():
        lengths = sorted(by_length)
        ahead = [n for n in lengths if by_length[n]["speedup"] > 1]
        wanted = {lengths[0], lengths[-1], *ahead[:1], *COMMON} if len(lengths) > 3 else lengths
        shown += [by_length[n] for n in lengths if n in wanted]
    return shown


def eager_time(row: Row) -> float | None:
    """Called from Python, one call at a time: exact attention's = 1."""
    if row.get("eager_speedup"):
        return float(1 / row["eager_speedup"])
    kind = ("b", "h", "n", "d", "dtype", "causal", "pass")
    exact = [each for each in gpu_rows() if each["method"] == "sdpa" and all(each[key] == row[key] for key in kind)]
    if row["device"] != "cuda" or not exact or not row.get("eager_seconds"):
        return None
    return float(row["eager_seconds"] / exact[-1]["eager_seconds"])


# ---- time against the length ---------------------------------------------------------------------


def error_of(found: Sequence[Row], n: int | None = None) -> float | None:
    """The output error of a method: of its own rows at the longest length, or of the error bar on the same data."""
    known = {row["n"]: row["error"] for row in found if row.get("error") is not None}
    if known:
        return float(known[max(known)])
    bars = [
        row for row in rows("cpu-bars")
        if row["what"] == "error" and row["method"] == found[0]["method"] and row["data"] == found[0].get("data")
        and found[0]["device"] == "cpu" and n in (None, row["n"])
    ]  # fmt: skip
    return float(bars[-1]["error"]) if bars else None


def speed_tables(found: Sequence[Row], peer: str) -> str:
    """One table for each machine and shape: times as fast as exact attention, by length, the passes side by side."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    usual = next((row["data"] for row in found if "data" in row), "")  # a row that failed does not name it
    for row in found:
        shape = (row["dtype"], row["h"], row["d"], row["causal"])
        kinds.setdefault((machine(row), row.get("data", usual), *shape), []).append(row)
    parts = []
    for same in kinds.values():
        latest = {(row["pass"], row["method"], row["n"]): row for row in same}  # later rows replace earlier ones
        shown = [row for row in latest.values() if row["method"] != "sdpa"]
        lengths = sorted({row["n"] for row in shown})
        passes = list(dict.fromkeys(row["pass"] for row in shown))
        body = [
            (
                f"`{method}`",
                *(" / ".join(speed(latest.get((which, method, n))) for which in passes) for n in lengths),
                "–" if (error := error_of([row for row in shown if row["method"] == method])) is None
                else human_error(error),
            )
            for method in dict.fromkeys(row["method"] for row in shown)
        ]  # fmt: skip
        words = f"{same[0]['h']} heads × {same[0]['d']}, {same[0]['dtype']}{', causal' if same[0]['causal'] else ''}"
        told = ["error at a method's longest length"] if any(row.get("error") is not None for row in shown) else []
        parts.append(
            table(("method", *(f"N = {spaced(n)}" for n in lengths), "output error"), body)
            + origin(
                [*latest.values()],
                " / ".join(passes),
                words,
                str(same[0].get("data", usual)),
                f"exact is {peer}",
                *told,
            )
        )
    return "\n".join(parts) or NOT_YET


def speed(row: Row | None) -> str:
    """Bold where the method is faster; a dagger where a bar of the benchmark is missed."""
    if row is None:
        return "–"
    if row.get("failed"):
        return "wrong"
    ratio = human_ratio(row["speedup"])
    words = (f"**{ratio}**" if row["speedup"] > 1 else ratio) + ("†" if row.get("met") is False else "")
    return words + ("‡" if is_former(row) and row["method"].startswith("refined") else "")


def cpu_table(causal: bool) -> Callable[[], str]:
    """Times as fast as exact attention on a CPU, by length."""

    def write() -> str:
        found = [row for row in rows("cpu-bars", "bench") if _is_speed(row) and row["device"] == "cpu"]
        return speed_tables([row for row in found if row["causal"] == causal], "torch's SDPA")

    return write


def gpu_rows() -> list[Row]:
    """Rows of the GPU bars at the newest commit that has some, and of cells that it did not reach those of the commit
    before; a rehearsal's are none."""
    found = [row for row in rows(GPU) if row["device"] == "cuda"]
    commits = [*dict.fromkeys(commit_of(row) for row in reversed(found))][:2]
    kind = (*KEYS, "pass")
    newest = {tuple(row[key] for key in kind): row for row in found if commit_of(row) in commits}
    return [*newest.values()]


def gpu_speeds(causal: bool) -> str:
    found = [row for row in gpu_rows() if _is_speed(row) and row["causal"] == causal]
    return speed_tables(found, "the fastest SDPA backend")


def gpu_table() -> str:
    """Times as fast as exact attention, by length, and the picture of the crossings."""
    if not gpu_rows():
        return NOT_YET
    words = "Time per token against the length; rings mark where a method passes exact attention"
    return f"{gpu_speeds(causal=False)}\n![{words}]({CROSSINGS})\n"


def gpu_causal_table() -> str:
    return gpu_speeds(causal=True)


def gpu_figures() -> str:
    """Everything that `benchmarks/gpu.py` prints, a line for each method and shape."""
    found = gpu_rows()
    if not found:
        return NOT_YET
    lines = ordered(joined(found))
    body = [(f"`{label}`", *others) for label, *others in map(cells, lines)]
    notes = "".join(f"- {each}\n" for each in failures(lines))
    return table(HEAD, body) + origin(found, str(found[-1]["dtype"])) + (f"\n{notes}" if notes else "")


def gpu_bars() -> str:
    """How many bars of `benchmarks/gpu.py` are met, and those that are not."""
    latest = {tuple(row[key] for key in (*KEYS, "pass")): row for row in gpu_rows() if row.get("bars")}
    bars = [(row, bar) for row in latest.values() for bar in row["bars"]]
    if not bars:
        return NOT_YET
    body = [
        (
            f"`{row['method']}`{', causal' if row['causal'] else ''}",
            f"{row['h']}×{row['d']}",
            spaced(row["n"]),
            row["pass"],
            bar["what"],
            "–" if bar["got"] is None else f"{bar['got']:.3g}",
            f"{'≤' if bar['most'] else '≥'} {bar['wanted']:.3g}",
        )
        for row, bar in bars
        if not bar["met"]
    ]
    head = ("missed by", "heads", "N", "pass", "what", "got", "bar")
    told = f"{len(bars) - len(body)} of {len(bars)} bars were met.\n"
    return told + (f"\n{table(head, body)}" if body else "") + origin([row for row, _ in bars])


def host_table() -> str:
    """What a call costs the host, beside what it takes from call to call: one shape, two lengths, every method."""
    found = [row for row in gpu_rows() if "host_seconds" in row]
    found = [row for row in found if row["n"] in HOST_LENGTHS and row["h"] == found[0]["h"] and not row["causal"]]
    if not found:
        return NOT_YET
    lines = [(line, any_of(line)) for line in ordered(joined(found))]
    body = [
        (f"`{row['method']}`", spaced(row["n"]), *(cell for which in PASSES for cell in _called(line.get(which))))
        for line, row in lines
    ]
    head = ("method", "length", *(f"{which}, {what}" for which in PASSES for what in ("host ms", "call to call ms")))
    shape = f"{found[0]['h']} heads × {found[0]['d']}, {found[0]['dtype']}"
    return table(head, body) + origin(found, shape, "forward under no_grad")


def _called(row: Row | None) -> tuple[str, str]:
    """Milliseconds on the host, and with the device's part."""
    if row is None:
        return "–", "–"
    times = (row["host_seconds"], row["eager_seconds"])
    return f"{times[0] * 1e3:.2f}{mark(row)}", f"{times[1] * 1e3:.2f}{mark(row)}"


def _is_speed(row: Row) -> bool:
    known = ("method", "pass", "n", "h", "d", "dtype", "causal", "device")
    return ("speedup" in row or "failed" in row) and all(key in row for key in known)


def memory_table() -> str:
    """Peak memory at 65 536 tokens and the error on the data of the speed table."""
    found = [row for row in rows("cpu-bars") if row["what"] in ("memory", "error")]
    if not found:
        return NOT_YET
    latest = {(row["method"], row["what"], row.get("pass")): row for row in found}
    memory = [row for row in latest.values() if row["what"] == "memory"]
    error = [row for row in latest.values() if row["what"] == "error"]
    passes = list(dict.fromkeys(row["pass"] for row in memory))
    lengths = [f"N = {spaced(each[0]['n'])}" if each else "" for each in (memory, error)]
    head = ("method", *(f"peak memory, {which}, {lengths[0]}" for which in passes), f"output error, {lengths[1]}")
    methods = dict.fromkeys(row["method"] for row in latest.values())
    body = [
        (f"`{method}`", *(_held(latest, method, "memory", which) for which in passes), _held(latest, method, "error"))
        for method in methods
    ]
    return table(head, body) + origin(found)


def _held(latest: Mapping[tuple[str, str, str | None], Row], method: str, what: str, which: str | None = None) -> str:
    row = latest.get((method, what, which))
    if row is None:
        return "–"
    if what == "error":
        return human_error(row["error"]) + mark(row)
    return f"{human_bytes(row['memory_bytes'])} ({human_ratio(row['memory_share'])}){mark(row)}"


def settings_table(*questions: str) -> Callable[[], str]:
    """One setting after another on the short sample."""

    def write() -> str:
        found = [row for row in (newest_run("settings") if rows("settings") else []) if row["question"] in questions]
        if not found:
            return NOT_YET
        body = [
            (
                f"`{row['method']}`",
                f"{row['error']:.4f}",
                f"{row['lowest']:.4f} – {row['highest']:.4f}",
                percent(row["cost_share"], row),
                time_of(row),
            )
            for row in found
        ]
        seeds = f"range over {found[0]['seeds']} seeds"
        head = ("method", "output error, mean", seeds, "multiply-adds, of exact's", "time, exact = 1")
        return table(head, body) + origin(found, "the embedded sample", *no_times(found))

    return write
