# What one does with this repository. `make` alone lists the targets.

SHELL := /bin/bash
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test demo bench profile soak format clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install Penstock with its development tools (again only when pyproject.toml changed)

# A shim of a version manager may be on the path without a Python behind it, so each candidate is run, not only looked up.
$(STAMP): pyproject.toml
	@found=; \
	for candidate in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "Penstock needs Python 3.11 or newer and found none; install it, or name it: make setup PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import venv, ensurepip' >/dev/null 2>&1; then \
	  echo "$$found has no venv module; install it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; \
	fi; \
	[ -x $(BIN)/python ] || "$$found" -m venv $(VENV)
	@echo "Installing Penstock and Spark into $(VENV); this takes a few minutes the first time."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@$(BIN)/python -m penstock.spark.java >/dev/null 2>&1 || { \
	  echo "There is no Java 17 or newer here, so one comes along as a Python package."; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,java]'; \
	  $(BIN)/python -m penstock.spark.java >/dev/null; }
	@touch $(STAMP)

test: setup ## lint, check formatting and types, run every test and every docstring example
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q

demo: setup ## run the demonstration
	$(BIN)/python examples/demo.py

bench: setup ## measure Penstock beside its peers, each in an environment of its own (BENCH="--short --workloads A" for less)
	PYTHONPATH=. $(BIN)/python -m benchmarks.peers $(BENCH)

profile: setup ## break an epoch on Spark down: where its time goes (PROFILE="--workload C" for other workloads)
	PYTHONPATH=. $(BIN)/python -m benchmarks.breakdown $(PROFILE)

soak: setup ## run the property tests with many more examples, and kill an application on Spark at every write
	PENSTOCK_HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -q tests/property
	$(BIN)/python -m pytest -q -m soak tests/spark

format: setup ## format the code and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment, caches and build results
	rm -rf $(VENV) benchmarks/environments dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
