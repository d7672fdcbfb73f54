# Every target sets up what it needs in .venv first; after the first time that takes a fraction of a second.
# Variables: PYTHON (which Python makes .venv), DEMO_OUT, PYTEST_ARGS, JOBS.

PYTHON ?= python3
DEMO_OUT ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
PYTEST_ARGS ?=
JOBS ?= 2

BIN := .venv/bin
FIND_PYTHON = command -v "$(PYTHON)" >/dev/null || { echo "set-up: there is no '$(PYTHON)' here;" \
	"install Python 3.11, 3.12 or 3.13, or run make with PYTHON=/path/to/it" >&2; exit 1; }

# Set-up runs as a target of its own, so that under -j it runs once per make and before whatever needs it.
.DEFAULT_GOAL := help
.PHONY: help demo test test-trl test-verl lint format clean set-up set-up-dev lint-style lint-format lint-types lint-imports

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

demo: set-up ## train a small agent for a few minutes and write its report (DEMO_OUT=folder)
	$(BIN)/tether train --config configs/demo.yaml --out "$(DEMO_OUT)"

# Two workers with one thread each: torch's own threads would only fight over the cores.
test: lint ## lint, then every test (PYTEST_ARGS="-k name" for some, JOBS=n for more workers)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

# The plug-ins' tests have environments of their own: TRL brings 200 MB of data libraries, and verl's pins differ from ours.
test-trl: ## the tests of the TRL plug-in, in .venv-trl
	@$(FIND_PYTHON)
	@"$(PYTHON)" scripts/set_up.py --venv .venv-trl gguf dev trl
	OMP_NUM_THREADS=1 .venv-trl/bin/python -m pytest -W default $(PYTEST_ARGS) tests/integrations tests/property/test_trl_equivalence.py

test-verl: ## the tests of the verl plug-in, in .venv-verl
	@$(FIND_PYTHON)
	@"$(PYTHON)" scripts/set_up.py --venv .venv-verl gguf dev data
	.venv-verl/bin/python -m pip install --quiet --no-deps -r tests/integrations/verl-requirements.txt
	OMP_NUM_THREADS=1 .venv-verl/bin/python -m pytest -W default $(PYTEST_ARGS) tests/integrations/test_verl.py

lint: lint-style lint-format lint-types lint-imports ## style, format, types and the direction of imports

format: set-up-dev ## rewrite the code in the project's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and build leftovers; runs/ stays
	rm -rf .venv .venv-trl .venv-verl .venv.lock build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

set-up:
	@$(FIND_PYTHON)
	@"$(PYTHON)" scripts/set_up.py gguf

set-up-dev:
	@$(FIND_PYTHON)
	@"$(PYTHON)" scripts/set_up.py gguf dev

lint-style: set-up-dev
	$(BIN)/ruff check .

lint-format: set-up-dev
	$(BIN)/ruff format --check .

lint-types: set-up-dev
	$(BIN)/mypy

lint-imports: set-up-dev
	$(BIN)/lint-imports
