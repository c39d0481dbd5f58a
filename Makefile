# make quickstart: environment, installation, and a small model trained from scratch
# make quickstart_dpo, make quickstart_grpo: the same, and a small model aligned with preferences or rewards
# make test:       environment, installation, lint, types, documentation, and the tests that see every planted fault: 10 minutes
# make test-all:   the same, and every other test: all matrices, all of the interpreter
# make long:       the tests that take minutes each, such as all families of transformers and kernels for every card
# make models:     the table of docs/models.md, from the installed transformers
# make docs:       the documentation in site/, strictly: a dead link or anchor is an error
# make peers:      Liger's own unit tests on our names (docs/liger.md), on the CPU or a GPU
# make compat:     the parity tests with the oldest and newest allowed libraries
# make newest:     every test with the newest release of every dependency
# make dist:       the wheel and the sdist in dist/, tried alone and beside what other frameworks pin
# make release-check: whether this commit can be released, a line for each thing that is missing (CONTRIBUTING.md)
# make docker:     an image with the trainers and the command line (docs/install.md)
#
# PYTHON chooses the interpreter (3.11 or newer; tested to 3.13), VENV the place of the environment, and PIP_FLAGS goes to pip: on a
# machine without a GPU, point it at the CPU build of torch to download far less.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
BIN := $(VENV)/bin
RUN_DIR ?= outputs/$@-$(shell date +%Y%m%d-%H%M%S)
PYTEST_WORKERS ?= 2
# The part of the tests: selected, rest, or nothing for all of them.
PART ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PYTEST_PART = -n $(PYTEST_WORKERS) --dist worksteal $(if $(PART),--part $(PART))

.PHONY: help quickstart quickstart_dpo quickstart_grpo test test-all long models lint types unit interpreter coverage docs peers compat newest dist release-check docker tables clean

help:
	@sed -n 's/^# make/make/p' Makefile

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11) and f"Python 3.11 or newer is needed (TRL asks for it), this is {sys.version.split()[0]}; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[train]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[test]'
	touch $@

quickstart quickstart_dpo quickstart_grpo: $(VENV)/.installed
	$(BIN)/liger-trainer train $@ --output_dir $(RUN_DIR)

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	touch $@

# What takes one core runs side by side, and before the tests, which take them all. tests/selection.py says which tests.
test: $(VENV)/.installed-test $(VENV)/.installed-docs
	$(MAKE) --jobs=2 types docs lint
	$(MAKE) unit interpreter PART=selected

test-all: test
	$(MAKE) unit interpreter PART=rest

long: $(VENV)/.installed-test
	$(PYTEST) --long -m long tests

models: $(VENV)/.installed
	HF_HUB_OFFLINE=1 $(BIN)/python -m liger_trainer.benchmarks.served --write

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy liger_trainer

# One thread a process: the tensors are tiny, and the workers already use the cores.
unit: $(VENV)/.installed-test
	$(PYTEST) $(PYTEST_PART) tests

# Branches of the product that the unit tests and the kernels under the interpreter take, here and in forked processes.
coverage: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet 'coverage>=7.10'
	$(BIN)/python -m coverage erase
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest tests
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m coverage run -m pytest -m kernel tests/kernels tests/liger
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered --sort=cover

interpreter: $(VENV)/.installed-test
	TRITON_INTERPRET=1 $(PYTEST) $(PYTEST_PART) -m kernel tests/kernels tests/liger

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# LIGER_ARCHIVE is Liger's source distribution where it cannot be downloaded, PEERS_FLAGS goes to pytest.
LIGER_ARCHIVE ?=
PEERS_FLAGS ?=
peers: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.peers.run_liger $(if $(LIGER_ARCHIVE),--archive $(LIGER_ARCHIVE)) $(PEERS_FLAGS)

# The parity tests with the oldest and the newest allowed torch, transformers, TRL, PEFT and accelerate.
# COMPAT_FLAGS="--versions oldest --reuse --libraries transformers trl peft accelerate" leaves torch and the rest as they are.
COMPAT_FLAGS ?=
compat: $(VENV)/.installed-test
	$(BIN)/python -m tests.compat.versions $(COMPAT_FLAGS)

# Recorded in tests/compat/newest.json where all pass. NEWEST_FLAGS="--keep torch" leaves out the largest download.
NEWEST_FLAGS ?=
newest: $(VENV)/.installed-test
	$(BIN)/python -m tests.compat.versions --versions newest --whole $(NEWEST_FLAGS)

# The wheel and the sdist, and the wheel in an empty environment and beside what other frameworks pin.
dist: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet build
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m tests.compat.wheel $(DIST_FLAGS) dist/*.whl

# tests/release_check.py says what it looks at.
release-check: $(VENV)/.installed-test
	$(BIN)/python -m tests.release_check

docker:
	docker build --tag liger-trainer .

# Rewrites the measured tables of README.md and docs/performance.md from benchmarks/results/.
tables: $(VENV)/.installed
	$(BIN)/python -m liger_trainer.benchmarks.tables

clean:
	rm -rf .coverage $(VENV) .venv-oldest .venv-newest .venv-patching build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
