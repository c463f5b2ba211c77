# The front door. `make` alone lists the targets.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup lock lint format types browser test demo screenshots bench chaos build lambda clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## build .venv from the locked, hashed requirements

$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "oncebridge needs Python 3.11 or later: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

lock: setup ## resolve the requirements anew
	$(PYTHON) -m venv build/lock && build/lock/bin/pip install --quiet uv
	build/lock/bin/uv pip compile pyproject.toml --group dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --upgrade -o requirements/dev.txt
	build/lock/bin/uv pip compile --group bench --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --upgrade -c requirements/dev.txt -o requirements/bench.txt
	build/lock/bin/uv pip compile pyproject.toml --extra dynamodb --extra http --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --upgrade -c requirements/dev.txt -o requirements/lambda.txt

format: setup ## lay the code out
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup ## style and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy on everything, pyrefly on the typed examples
	$(BIN)/mypy
	$(BIN)/pyrefly check

browser: setup ## a Chromium for the tests of the dashboard, where there is none
	@$(BIN)/python -m tests.servers.browser

test: setup ## every test, real processes and a real browser included
	-@$(BIN)/python -m tests.servers.browser # once, and not by each worker
	$(BIN)/pytest -n 2

demo: setup ## a simulated Genesys stream by HTTP through SQLite, in half a minute
	$(BIN)/oncebridge demo

screenshots: setup browser ## the pictures of the dashboard in docs/img
	$(BIN)/python -m tests.browser.pictures docs/img

.venv/.bench: requirements/bench.txt $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bench.txt
	@touch $@

bench: .venv/.bench ## the numbers, as ratios in one run
	$(BIN)/python bench/run.py

chaos: setup ## kill -9 and the long simulation, as a table
	$(BIN)/python -m tests.chaos.run

lambda: setup ## the Lambda package and layer, for x86_64 and arm64
	$(BIN)/python deploy/lambda/build.py dist/lambda

build: setup ## wheel and sdist
	$(BIN)/python -m hatchling build

clean: ## remove what the other targets made
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
