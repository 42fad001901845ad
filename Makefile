# `make demo` and `make test` do everything on a fresh machine: build .venv with the versions of constraints.txt, then train or test.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
TORCH ?= 2.13.0
WORKERS ?= 2
RUN_DIR ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
OVERRIDES ?=
PYTEST_ARGS ?=
# The first interpreter that starts and is new enough; name another with `make PYTHON=/path/to/python setup`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

.PHONY: help setup demo test test-fast lint format bench lock clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(STAMP)  ## build .venv (again only when pyproject.toml or constraints.txt changed)

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "setup: needs Python 3.11 or newer, found $$(python3 --version 2>&1 || true); install it, or name it: make setup PYTHON=/path/to/python" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "setup: $(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 2; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "setup: installing the versions of constraints.txt into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch --editable '.[dev]' \
		2> >(grep -vE '^(WARNING: Location|DEPRECATION)' >&2)
	@touch $@

demo: setup  ## train the demo model on real text (3 to 5 minutes on two cores); `make demo OVERRIDES="train.steps=20"`
	$(BIN)/moe-train pretrain +experiment=demo run.dir=$(RUN_DIR) $(OVERRIDES)

test: lint  ## lint and every test (at most 15 minutes on two cores)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-fast: setup  ## unit and oracle tests that are not marked slow (3 minutes)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not e2e" $(PYTEST_ARGS)

lint: setup  ## formatting, lint rules, types, Dockerfile and shell syntax
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	bash -n .ci/run
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; else echo "lint: hadolint has no package for this platform, Dockerfile not checked"; fi

format: setup  ## rewrite files in the project's format and apply the safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## measure speed against peers, write bench/records/
	$(BIN)/python -m bench

lock:  ## write constraints.txt anew from the newest releases that pyproject.toml accepts, with TORCH=2.13.0
	@dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; \
	"$(PYTHON)" -m venv "$$dir/venv"; \
	"$$dir/venv/bin/pip" install --quiet --disable-pip-version-check "torch==$(TORCH)" --editable '.[dev]'; \
	{ echo "# Exact versions of everything in .venv (the dev extra). Written by \`make lock\`; do not edit by hand."; \
	  "$$dir/venv/bin/pip" freeze --all --exclude pip --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//' | LC_ALL=C sort -f; } > constraints.txt

clean:  ## remove the environment and what builds and tests left (runs/ stays)
	rm -rf $(VENV) build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
