# From a clean clone: `make demo` shows the library at work, `make test` proves it. Both set up .venv by themselves.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= auto
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Some hypervisors announce AMX and AVX-512-BF16 without passing them on: bf16 matrix products then die with SIGILL
# inside oneDNN. This ceiling keeps oneDNN to instructions that exist; CPUs with less are not affected by it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format types bench tables notebook docs dist clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

setup: $(READY)  ## create .venv with the library (editable) and all tools

# torch first and by itself, so that the pin decides which build comes; the rest is small
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## compare every method on the embedded sample, write report.html and pictures
	$(BIN)/clusterattn compare

test: $(READY)  ## run every test on the CPU
	$(BIN)/python -m pytest --quiet --numprocesses $(JOBS)

lint: $(READY)  ## ruff: check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## lay the code out
	$(BIN)/ruff format .

types: $(READY)  ## mypy, strict on both packages
	$(BIN)/mypy

bench: $(READY)  ## the ratios to exact attention that the README quotes
	$(BIN)/python benchmarks/cpu.py

tables: $(READY)  ## tables and pictures of README and docs/ from the rows in results/
	$(BIN)/python benchmarks/readme_tables.py

notebook: $(READY)  ## run docs/first-steps.ipynb and keep what it prints
	$(BIN)/python benchmarks/notebook.py

docs: $(READY)  ## the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(READY)  ## a wheel and an sdist in dist/, as an index would accept them
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

clean:  ## remove .venv and everything generated
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
