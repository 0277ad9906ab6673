"""The papers' tables and figures, one file each; `clusterattn reproduce --list` shows them."""

from __future__ import annotations

import importlib

from ._experiment import Cell, Context, Experiment, Table, beside, chosen, spread

# one module for each group of experiments that share their work; a module lists its own in EXPERIMENTS
MODULES: tuple[str, ...] = (
    "clustered_speech",
    "clustered_speech_figures",
    "clustered_far",
    "clustered_table4",
    "clustered_fig5",
    "clustered_fig8",
    "clustered_outlook",
    "clustered_fig4",
    "clusterformer_timings",
    "smyrf_rebuttal",
    "smyrf_biggan",
    "smyrf_mnli",
    "clusterformer_table1",
    "clusterformer_text",
    "clusterformer_settings",
    "clusterformer_table6",
    "clusterformer_table8",
)


def experiments() -> dict[str, Experiment]:
    """Every experiment by name."""
    found = [each for module in MODULES for each in importlib.import_module(f".{module}", __name__).EXPERIMENTS]
    return {each.name: each() for each in found}


__all__ = ["Cell", "Context", "Experiment", "Table", "beside", "chosen", "experiments", "spread"]
