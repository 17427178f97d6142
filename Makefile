# `make` lists what there is to do. Every target does its own set-up: Python 3.11 or newer and make are enough.

PYTHON_IN_VENV := .venv/bin/python
PYTEST_ARGS ?= -q -n 3 --dist worksteal
MINUTES ?= 2
STORE ?= postgres
# What is imported is compiled once, and not again by each of the thousand processes that the tests start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format contract docs pages pictures sweep powercut chaos bench pins clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

setup: ## make .venv and install the package with everything that tests and checks need
	@sh scripts/setup.sh dev

demo: ## kill the provisioning agent between act and record, then watch it come back
	@sh scripts/setup.sh core
	@sh scripts/demo.sh

test: check ## run the checks, then all tests
	$(PYTHON_IN_VENV) -m pytest $(PYTEST_ARGS)

check: setup ## lint, formatting, types, and who imports whom
	$(PYTHON_IN_VENV) -m ruff check .
	$(PYTHON_IN_VENV) -m ruff format --check .
	$(PYTHON_IN_VENV) -m mypy
	$(PYTHON_IN_VENV) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

format: setup ## format the code and mend what the linter can mend
	$(PYTHON_IN_VENV) -m ruff check --fix .
	$(PYTHON_IN_VENV) -m ruff format .

contract: setup ## let a store pass the contract of all stores (STORE=memory, sqlite, postgres, sqlalchemy, redis or blobs)
	$(PYTHON_IN_VENV) -m pytest $(PYTEST_ARGS) $(wildcard tests/contract/*_$(STORE).py)

docs: setup ## build the site of the documentation into site/, offline
	$(PYTHON_IN_VENV) scripts/build_docs.py

pages: setup ## write what is made in the pages again: quotes, output, lists, the reference
	$(PYTHON_IN_VENV) -m tests.pages

pictures: setup ## record and draw the pictures of the pages again
	$(PYTHON_IN_VENV) scripts/pictures.py
	$(PYTHON_IN_VENV) scripts/viewer_pictures.py
	$(PYTHON_IN_VENV) scripts/terminal_picture.py docs/pictures/demo.svg "agent-runtime demo" .venv/bin/agent-runtime demo

sweep: setup ## crash at every commit of a run and recover, on every store
	$(PYTHON_IN_VENV) scripts/with_postgres.py $(PYTHON_IN_VENV) -m agent_runtime.testing.crash_sweep --postgres '{url}'

powercut: setup ## open a SQLite store as each of 50,000 power cuts may have left it (STATES=)
	$(PYTHON_IN_VENV) -m tests.powercut $(if $(STATES),--states $(STATES))

chaos: setup ## kill, freeze and cut off workers, supervisors and the store (MINUTES=2, STORE=postgres or sqlite, SEED=)
	$(PYTHON_IN_VENV) -m tests.chaos --minutes $(MINUTES) --store $(STORE) $(if $(SEED),--seed $(SEED)) $(CHAOS_ARGS)

bench: setup ## measure steps a second, commits a step, growth and memory
	$(PYTHON_IN_VENV) bench/run.py

pins: ## pin the dependencies again (needs uv; UPGRADE=1 takes the newest)
	@sh scripts/pin.sh

clean: ## remove .venv, caches and what builds leave behind
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist site
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
