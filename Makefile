# `make serve` serves the bundled model, `make test` runs every test, `make help` lists the rest.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
TORCH ?= 2.13.0
MODEL ?= models/tiny
PORT ?= 30000
JOBS ?= logical
PYTEST_ARGS ?=
ARGS ?=

# Without bytecode, each of the hundreds of processes that tests start compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input

.PHONY: help refresh-tiny install install-test serve test test-null test-ranks check size format hooks kernels sanitize soak bench docs release-check clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' Makefile

install: $(VENV)/.installed ## create .venv with Thalweg and its dependencies (TORCH=2.12.1 for another torch)

install-test: $(VENV)/.installed-test ## the same, with test dependencies

serve: install ## serve the bundled model on port 30000 (MODEL=, PORT=, ARGS="--flags")
	@exec $(BIN)/thalweg serve --model $(MODEL) --port $(PORT) $(ARGS)

# A test worker grows to 2.5 GB.
test: install-test ## run every test on up to 4 cores (JOBS=0: one process; PYTEST_ARGS="-k radix": some)
	@$(BIN)/python -m pytest -m "not soak" -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-null: install-test ## run the tests that need no torch, in seconds
	@$(BIN)/python -m pytest -q -m "not soak" -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder tests/null $(PYTEST_ARGS)

test-ranks: install-test ## run what several processes of one model do, on a CPU (two files at a time, each of up to 4 processes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not soak" -n 2 --dist loadfile --no-loadscope-reorder tests/ranks $(PYTEST_ARGS)

check: install-test ## check lint, format, strict types, import direction
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/null/test_layering.py
	@$(BIN)/python -m tools.size

size: install-test ## count code tokens by room; fails above a ceiling (tools/ceilings.yaml)
	@$(BIN)/python -m tools.size

format: install-test ## format, and fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

hooks: install-test ## install pre-commit and its hooks: lint, types, commit subject; null tier before a push
	@$(PIP) pre-commit
	@$(BIN)/pre-commit install

kernels: install-test ## compile every Triton kernel for sm_90, sm_100 and gfx950, without a GPU (needs triton)
	@for target in sm_90 sm_100 gfx950; do $(BIN)/python -m tests.gpu.offline --target $$target; done

sanitize: ## run compute-sanitizer over small kernel cases on a GPU (PYTHON= one with CUDA torch)
	@PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 $(PYTHON) -m pytest -q -x tests/cpu/test_kernels.py -k triton
	@PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --error-exitcode 9 $(PYTHON) -m pytest -q -x tests/cpu/test_kernels.py -k triton

soak: install-test ## run the random drivers of cache, scheduler and processes (KILLS=200 for more of these), then tests that draw cases, from a new seed (an hour and a half)
	@$(BIN)/python -m pytest -m soak --hypothesis-profile=default $(PYTEST_ARGS)
	@export TEST_SEED=$${TEST_SEED:-$$RANDOM}; echo "TEST_SEED=$$TEST_SEED"; $(BIN)/python -m pytest $$(grep -rl tests.seed tests/cpu) $(PYTEST_ARGS)

bench: install ## measure one-batch speed of the bundled model (MODEL=, ARGS=)
	@exec $(BIN)/thalweg bench one-batch --model $(MODEL) $(ARGS)

docs: install ## write docs/configuration.md from the flags, tables of API fields, and tables from benchmarks/
	@$(BIN)/python -m tools.configuration_page > docs/configuration.md
	@$(BIN)/python -m tools.api_tables
	@$(BIN)/python -m tools.release.docs

refresh-tiny: install-test ## make again what depends on models/tiny: results, tables, benchmarks on a CPU (minutes; ARGS="--list")
	@$(BIN)/python -m tools.train_tiny.refresh $(ARGS)

release-check: install-test ## run what a release needs: compose, parity, evals, soak, docs, age of GPU results (ARGS="--only docs")
	@$(BIN)/python -m tools.release.check $(ARGS)

clean: ## remove the environment and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"Thalweg needs Python 3.11 or newer, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 -m venv failed: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }

$(VENV)/.torch: | $(VENV)/bin/python
	@echo "installing torch $(TORCH): about 200 MB for a CPU, several GB for a GPU (once)"
	@tools/install_torch.sh $(BIN)/python $(TORCH)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	@echo "installing Thalweg and its other libraries into $(VENV): about 50 MB (once)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need"
	@$(PIP) --editable '.[test]'
	@tools/install_chromium.sh
	@touch $@
