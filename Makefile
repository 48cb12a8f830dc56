# `make run` and `make test` are all the set-up there is: each makes .venv when it is missing or older than the lock file.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test check format clean

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

# Over gloo: what exchanges something, under every plan and setting. Left out are files that start no ranks (one process, accumulation,
# the table) or whose own ranks make the exchanges of test_distributed.py (the tools, Hugging Face), and the largest models: a
# transport sees flat memory, whichever model it belongs to, and the sizes at which messages are cut are those of shared memory.
# Eight ranks on two cores take long over gloo, too.
NOT_OVER_GLOO := one_process accumulation edge_case_table testing verify hugging_face

test: $(STAMP)
	$(BIN)/python -m pytest tests/unit -n 2 -q
	$(BIN)/python -m pytest tests/parity tests/transport tests/transport_torch -n 2 -q
	$(BIN)/python -m pytest tests/faults tests/docs -n 2 -q
	MESHWRIGHT_TRANSPORT=gloo $(BIN)/python -m pytest tests/parity -n 2 -q -k "not hf_ and not wide and not style_ and not many_ranks" $(NOT_OVER_GLOO:%=--ignore tests/parity/test_%.py)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/pyright
	$(BIN)/python -m pytest tests/unit/test_layers.py -q

format: $(STAMP)
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build runs
