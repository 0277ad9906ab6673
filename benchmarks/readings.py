"""A translation toy for ClusterFormer's readings: which is best, and what is its grouping worth?

    python benchmarks/readings.py --data DATA                 two seeds: about 35 minutes on one CPU thread
    python benchmarks/readings.py --data DATA --only spread   those whose name this regular expression finds

Most of one epoch of Multi30k by a small encoder and decoder; everything but the attention is shared. What is judged is
the likelihood of 500 test sentences, in nats a token, from the prefix alone as in a search: it tells readings apart
long before BLEU does. Beside the readings stand exact attention, improved clustered attention, and two controls
without any grouping: tokens dealt out by lot, anew in every layer of every call, and blocks of neighbours as they stand
in the sentence. Rows go to results/; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

from clusterattn.measure import Row, append, environment, rows_path
from clusterattn.methods import ClusterFormer
from clusterattn.nn import ClusterMap
from clusterattn_papers.reproduce._experiment import pinned
from clusterattn_papers.reproduce._readings import DEFAULT, READINGS, reading
from clusterattn_papers.tasks import batches
from clusterattn_papers.tasks.translation import Translate, read_pairs
from clusterattn_papers.train import Settings, fit

sys.path.insert(0, str(Path(__file__).parent))  # what lies beside this file

from table_words import RESULTS, rows

CLUSTERS = 3  # Table 1's
SIZES = {"dim": 128, "heads": 4, "layers": 2, "feedforward": 256, "dropout": 0.1}
STEPS, BATCH, TEST, PIECES = 800, 32, 500, 2000
SEEDS = (0, 1)


def _changed(**settings: float | bool) -> str:
    return str(ClusterFormer(clusters=CLUSTERS, **(READINGS[DEFAULT] | settings)))


OFF = "clusterformer-off"
TRIED = {  # name -> method
    "transformer": "exact",
    "improved": "improved:clusters=3,top=8,block=8",  # as in Table 1
    **{label: reading(label, CLUSTERS) for label in READINGS},
    f"{DEFAULT}, L1 alone": _changed(nu=0.0),
    f"{DEFAULT}, sharpness 5": _changed(sharpness=5.0),
    f"{DEFAULT}, each layer its own centroids": _changed(pass_on=False),
    "by lot": reading(OFF, CLUSTERS),
    "by place": reading(OFF, CLUSTERS),
}
CONTROLS = {"by lot": torch.randn_like, "by place": torch.zeros_like}  # what is grouped instead of the hidden states


def task_of(data: Path) -> Translate:
    pairs = read_pairs(data, "de", "en")
    # training judges dev once, at its end, by a slow search: as few as the groupings are watched on
    return Translate(pairs | {"dev": pairs["dev"][:32], "test": pairs["test"][:TEST]}, vocabulary=PIECES)


def trained(task: Translate, name: str, seed: int) -> Row:
    torch.manual_seed(seed)
    model = task.model(pinned(TRIED[name]), **SIZES)
    for module in model.modules():
        if isinstance(module, ClusterMap) and name in CONTROLS:
            module.register_forward_hook(lambda _, given, points: CONTROLS[name](points))
    settings = Settings(
        steps=STEPS,
        batch=BATCH,
        optimizer="adamw",
        lr=2e-3,
        warmup=STEPS // 10,
        decay="linear",
        clip=1.0,
        evaluate=STEPS,
        seed=seed,
    )
    fitted = fit(task, model, settings, device="cpu")
    with torch.no_grad():
        model.eval()
        found = torch.tensor([task.surprises(model, batch) for batch in batches(task, "test", TEST // 2)]).sum(0)
    whole, prefix, tokens = found.tolist()
    last = fitted.history[-1]
    return {
        "reading": name,
        "spec": TRIED[name],
        "seed": seed,
        "steps": STEPS,
        "batch": BATCH,
        **SIZES,
        "loss": last["loss"],
        "nll": whole / tokens,
        "prefix_nll": prefix / tokens,
        **({"groupings": last["groupings"]} if "groupings" in last and name not in CONTROLS else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of Multi30k: train.de.gz, train.en.gz, …")
    parser.add_argument("--only", default="", help="a regular expression: readings whose name it finds")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    task, around = task_of(given.data), environment()
    path = rows_path(RESULTS, "readings", "cpu", around)
    done = {(row["reading"], row["seed"], row["steps"]) for row in rows("readings")}
    for seed in given.seeds:  # a whole seed first: whatever is interrupted can be compared
        for name in filter(re.compile(given.only).search, TRIED):
            if (name, seed, STEPS) not in done:
                row = trained(task, name, seed)
                append(path, {"theme": "readings", **row, "environment": around})
                print(f"{name}, seed {seed}: {row['prefix_nll']:.3f} nats a token", flush=True)


if __name__ == "__main__":
    main()
