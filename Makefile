# `make run` and `make test` are all the set-up there is: each makes .venv when it is missing or older than the lock file.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs

.PHONY: run test test-cells test-grid test-torch cells check docs docs-check format clean

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	-$(BIN)/python -m meshwright.comm.shm.build
	touch $(STAMP)

run: $(STAMP)
	$(BIN)/meshwright train examples/gpt_python.toml
	$(BIN)/meshwright compare examples/gpt_python.toml --plans "single; data_parallel; model_parallel; distributed"

# Ranks and workers import the same modules again and again: without their bytecode each compiles them anew.
test test-cells test-grid: export PYTHONDONTWRITEBYTECODE =

# Tests with ranks wait as well as compute, for deadlines, starts and each other: three workers, on two cores too. Each plan, setting
# and number of ranks runs a second time over gloo, in the same session (tests/parity/over_gloo.py). `test` runs one cell of each
# test, and of the tables each plan once; `test-cells` the other values of its parameters. .ci/run runs both (docs/adr/0033).
CELLS := -n 3 -q --each-value --over-gloo
RANKS := tests/parity tests/transport tests/transport_torch tests/faults tests/docs
test: $(STAMP)
	$(BIN)/python -m pytest tests/unit -n 2 -q
	$(BIN)/python -m pytest $(RANKS) $(CELLS) --half first

test-cells: $(STAMP)
	$(BIN)/python -m pytest $(RANKS) $(CELLS) --half second

# The campaign: every model under every plan with every setting, and all of it over gloo too. Hours; `-k` narrows it: make test-grid K=mlp
K ?=
test-grid: export MESHWRIGHT_FULL_GRID = 1
test-grid: $(STAMP)
	$(BIN)/python -m pytest $(RANKS:tests/docs=) -n 3 -q -k "$(K)"
	MESHWRIGHT_TRANSPORT=gloo $(BIN)/python -m pytest tests/parity -n 3 -q $$($(BIN)/python -m tests.parity.over_gloo) -k "$(K)"

# The tests with another release of torch and the newest of everything else, in an environment in a temporary folder:
# make test-torch TORCH=2.11.0 PYTHON=python3.12
TORCH ?=
OTHER := $(or $(TMPDIR),/tmp)/meshwright-torch-$(TORCH)
test-torch: export PYTHONDONTWRITEBYTECODE =
test-torch:
	test -n "$(TORCH)"
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)" --editable ".[dev]"
	$(OTHER)/bin/python -m meshwright.comm.shm.build
	$(OTHER)/bin/python -m pytest tests/unit -n 2 -q
	$(OTHER)/bin/python -m pytest $(RANKS) -n 3 -q --each-value

# The committed table of the cells of `make test` and `make test-cells`.
cells: $(STAMP)
	PYTHONPATH=examples $(BIN)/python -m tests.parity.cell_table > tests/parity/cells.md

check: $(STAMP)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/pyright
	$(BIN)/python -m pytest tests/unit/test_layers.py -q

# The site, in build/docs; a warning fails it. The output that its pages show is put in by docs/make_pages.py, and `make test` compares it.
docs: $(DOCS_STAMP)
	$(BIN)/sphinx-build -c docs -b html -W --keep-going -q . build/docs
	@echo "build/docs/index.html"

# Every script and command of the pages, each started as a reader starts it; also under torchrun, and beside other libraries that are installed.
docs-check: docs
	$(BIN)/python docs/make_pages.py --check
	$(BIN)/python docs/check_started.py

$(DOCS_STAMP): $(STAMP) docs/requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r docs/requirements.lock
	touch $(DOCS_STAMP)

format: $(STAMP)
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build runs
