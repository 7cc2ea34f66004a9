# Every target sets up .venv by itself. Needs Python 3.11 or newer, make and git.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs
SEED   ?= 1
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: demo ui test test-all slow lint format lock wheel-check chaos drills acceptance mutants bench docs notebooks screenshots clean
.DEFAULT_GOAL := test

$(BIN)/uv:
	$(PYTHON) -c 'import sys; sys.exit("ragfence needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

# Exactly what uv.lock names, by its hashes. UV_PROJECT_ENVIRONMENT might name another environment, so it is said here.
$(READY): pyproject.toml uv.lock | $(BIN)/uv
	UV_PROJECT_ENVIRONMENT=$(VENV) $(BIN)/uv sync --quiet --frozen --extra dev --python $(BIN)/python
	touch $(READY)

demo: $(READY)  ## the main job on real documents, through Dagster; embedded, no server
	$(BIN)/python -m pipelines.demo

ui: $(READY)  ## Dagster's UI on the state of the demo; PORT=3000
	PORT=$(PORT) $(BIN)/python -m pipelines.ui

# Which tests are `thorough` or `slow`, and why: tests/thorough.py and CONTRIBUTING.md.
test: lint  ## lint and types, then the tests of a developer's loop: every rule, on every store
	$(PYTEST) -m 'not slow and not thorough'

test-all: test  ## `make test`, then the rest of what a change must pass: other servers, process kills, the demo, the wheel
	$(PYTEST) -m 'thorough and not slow'
	$(MAKE) wheel-check

slow: $(READY)  ## the tests that neither of them runs, and the state machines at length
	RAGFENCE_EXAMPLES=2000 $(PYTEST) -m slow
	RAGFENCE_EXAMPLES=2000 $(PYTEST) tests/machine tests/contract/test_lua_agrees.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/ragfence policy check pipelines/ragfence.yml >/dev/null

lock: | $(BIN)/uv  ## uv.lock anew, after a change of the dependencies in pyproject.toml
	$(BIN)/uv lock --python $(BIN)/python

wheel-check: $(READY)  ## builds the wheel, installs it alone into an empty environment, and uses it there
	$(BIN)/python -m tests.wheel

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

chaos: $(READY)  ## real processes killed, frozen and cut off; SEED=1 repeats a run
	$(BIN)/python -m tests.chaos --seed $(SEED)
	$(MAKE) slow

drills: $(READY)  ## Redis replicated, sharded and plain loses servers under load; the table of docs/drills.md
	$(BIN)/python -m tests.drills --seed $(SEED)

acceptance: $(READY)  ## a million events, duplicates, kills, a flush and a failover: one effect each; out/acceptance.json
	$(BIN)/python -m tests.acceptance --seed $(SEED)

mutants: $(READY)  ## deliberately broken variants; the suite must catch every one
	$(BIN)/python -m tests.mutants

# The peers have environments of their own, made once and only for this: one each for operations, for documents and for
# the API, whose peers want different versions of redis-py. Without them, the rest is measured all the same.
PEERS := .venv-bench
$(PEERS)/powertools/.ready: PACKAGES := 'aws-lambda-powertools[redis,aws-sdk]' hiredis
$(PEERS)/documents/.ready: PACKAGES := langchain-core langchain-classic llama-index-core llama-index-storage-docstore-redis hiredis
$(PEERS)/api/.ready: PACKAGES := 'asgi-idempotency-header[redis]' fastapi 'uvicorn[standard]' hiredis

$(PEERS)/powertools/.ready $(PEERS)/documents/.ready $(PEERS)/api/.ready: | $(BIN)/uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(@D) \
	&& $(BIN)/uv pip install --quiet --python $(@D)/bin/python $(PACKAGES) \
	&& touch $@ || { rm -rf $(@D); echo '$(@D) could not be installed'; }

bench: $(READY) $(PEERS)/powertools/.ready $(PEERS)/documents/.ready $(PEERS)/api/.ready  ## beside what one would use instead; goals met or missed; PART=2 for one part
	$(BIN)/python -m tests.bench $(if $(PART),--part $(PART))

$(DOCS_READY): pyproject.toml $(READY)
	UV_PROJECT_ENVIRONMENT=$(VENV) $(BIN)/uv sync --quiet --frozen --extra dev --extra docs --python $(BIN)/python
	touch $(DOCS_READY)

docs: $(DOCS_READY)  ## the documentation as a site in out/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

notebooks: $(READY)  ## run anew, on a sample made anew, and stored with what they show
	$(BIN)/python -m tests.notebooks.execution

screenshots: $(READY)  ## the pictures of Dagster's UI in docs/images, taken anew; needs Chromium
	RAGFENCE_SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/pipelines/test_ui.py

clean:
	rm -rf $(VENV) .venv-bench .ragfence out .mypy_cache .ruff_cache .hypothesis build dist
