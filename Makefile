# Every target sets up .venv by itself. Needs Python 3.11 or newer, make and git.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SEED   ?= 1
WORKERS ?= 2

.PHONY: demo test lint format chaos drills mutants bench clean
.DEFAULT_GOAL := test

$(BIN)/uv:
	$(PYTHON) -c 'import sys; sys.exit("ragfence needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(READY): pyproject.toml | $(BIN)/uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[dev]'
	touch $(READY)

demo: $(READY)  ## the main job, embedded, no server
	$(BIN)/python -m pipelines.demo

test: lint  ## lint, types, layers, then every fast test on every store
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

chaos: $(READY)  ## real processes killed, frozen and cut off; SEED=1 repeats a run
	$(BIN)/python -m tests.chaos --seed $(SEED)

drills: $(READY)  ## Redis replicated, sharded and plain loses servers under load; the table of docs/drills.md
	$(BIN)/python -m tests.drills --seed $(SEED)

mutants: $(READY)  ## deliberately broken variants; the suite must catch every one
	$(BIN)/python -m tests.mutants

# The peer has an environment of its own, made once and only for this. Without it, the rest is measured all the same.
PEER := .venv-bench

$(PEER)/.ready: | $(BIN)/uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(PEER) \
	&& $(BIN)/uv pip install --quiet --python $(PEER)/bin/python 'aws-lambda-powertools[redis,aws-sdk]' hiredis \
	&& touch $@ || { rm -rf $(PEER); echo 'the peer could not be installed'; }

bench: $(READY) $(PEER)/.ready  ## ragfence beside raw redis-py and AWS Lambda Powertools; goals met or missed
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) .venv-bench .ragfence out .mypy_cache .ruff_cache .hypothesis build dist
