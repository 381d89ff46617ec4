# Every target works on a fresh clone: it makes the environment in .venv that it needs.
# Another Python (3.11 or later): make demo PYTHON=python3.12

PYTHON ?= python3.11
BIN := .venv/bin

# Compiled modules are kept: the tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-part docs format clean

help:  ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: .venv/.installed  ## Train a small GPT on 2 processes with 1F1B, and verify it bit for bit
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 \
		examples/train_gpt.py --schedule 1f1b --verify

test: .venv/.installed-dev  ## Lint, check types and run the tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python tools/processor.py $(if $(AT_MOST),--at-most $(AT_MOST)) \
		$(BIN)/pytest --quick -n auto --maxprocesses 8 --durations 10

test-all: test-part  ## Run all tests: long trials, browsers and wide sweeps too

test-part: .venv/.installed-dev  # TESTS: options of pytest that choose some
	$(BIN)/pytest -n auto --maxprocesses 8 $(TESTS)

docs: .venv/.installed-dev  ## Make the guides and the API reference: build/docs/index.html
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo build/docs/index.html

format: .venv/.installed-dev  ## Format the code and fix what ruff can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove the environment and everything else that can be made again
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: an environment is installed again only when its requirements have changed.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

.venv/.installed-dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch .venv/.installed $@
