# The front door. `make` alone lists the targets.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
PIP_INSTALL := pip install --quiet --disable-pip-version-check

# PYTHON=python3.13 is the Python of an environment. One of another version is replaced; without
# PYTHON, the environment that exists is used.
ifneq ($(origin PYTHON),file)
  VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  ifeq ($(VERSION),)
    $(error PYTHON=$(PYTHON) does not run: name a Python 3.11 or later)
  endif
endif
version_of = $(shell sed -n 's/^version = \([0-9]*\.[0-9]*\).*/\1/p' $(1)/pyvenv.cfg 2>/dev/null)
if_other_python = $(if $(VERSION),$(if $(filter $(VERSION),$(call version_of,$(1))),,other-python))
.PHONY: other-python

define venv # in the directory of the target
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "oncebridge needs Python 3.11 or later: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(if $(filter other-python,$^),--clear )$(@D)
endef

.DEFAULT_GOAL := help
.PHONY: help setup lock lint format types browser test test-full demo screenshots bench chaos soak model fuzz docs supply build \
  lambda clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## build .venv from the locked, hashed requirements

$(STAMP): requirements/dev.txt pyproject.toml $(call if_other_python,.venv)
	$(venv)
	$(BIN)/$(PIP_INSTALL) --require-hashes -r requirements/dev.txt
	$(BIN)/$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

lock: setup ## resolve the requirements anew
	$(PYTHON) -m venv build/lock && build/lock/bin/pip install --quiet uv
	build/lock/bin/uv pip compile pyproject.toml --group dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --upgrade -o requirements/dev.txt
	build/lock/bin/uv pip compile --group bench --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --upgrade -c requirements/dev.txt -o requirements/bench.txt
	build/lock/bin/uv pip compile pyproject.toml --extra dynamodb --extra http --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --upgrade -c requirements/dev.txt -o requirements/lambda.txt
	build/lock/bin/uv pip compile pyproject.toml --extra service --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --upgrade -c requirements/dev.txt -o requirements/service.txt
	printf 'hatchling\neditables\n' | build/lock/bin/uv pip compile - --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --upgrade -c requirements/dev.txt -o requirements/build.txt
	for group in docs supply; do \
	  build/lock/bin/uv pip compile --group $$group --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --no-header --upgrade -c requirements/dev.txt -o requirements/$$group.txt || exit; done
	echo 'atheris==3.0.0' | build/lock/bin/uv pip compile pyproject.toml - --extra service --universal \
	  --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --upgrade -o requirements/fuzz.txt

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

test: setup ## the quick suite, on real servers and in a real browser (aim: 8 minutes)
	-@$(BIN)/python -m tests.servers.browser # once, and not by each worker
	-@$(BIN)/python -m tests.servers.spin
	$(BIN)/pytest -n 4 # of two cores: half of the time is spent waiting for servers and processes

test-full: setup ## every test at full size: about half an hour
	-@$(BIN)/python -m tests.servers.browser
	-@$(BIN)/python -m tests.servers.spin
	$(BIN)/pytest -n 2 --full

build/demo/.ready: requirements/service.txt requirements/build.txt pyproject.toml $(call if_other_python,build/demo)
	$(venv)
	build/demo/bin/$(PIP_INSTALL) --no-compile --require-hashes -r requirements/service.txt -r requirements/build.txt
	build/demo/bin/$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

demo: build/demo/.ready ## a simulated Genesys stream by HTTP through SQLite, in half a minute
	build/demo/bin/oncebridge demo

screenshots: setup browser ## the pictures of the dashboard in docs/img
	$(BIN)/python -m tests.browser.pictures docs/img

.venv/.bench: requirements/bench.txt $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bench.txt
	@touch $@

bench: .venv/.bench ## the numbers, as ratios in one run
	$(BIN)/python bench/run.py

chaos: setup ## the whole proof, as a table, in 90 minutes (ARGS=--resume goes on with it)
	$(BIN)/python -m tests.chaos.run $(ARGS)

soak: setup ## half an hour at a steady rate: memory, files and tables have to stay flat
	$(BIN)/python -m tests.chaos.soak

model: setup ## the protocol as a model, all of it (Spin; Debian's, where there is none)
	$(BIN)/python -m spec.check --full

FOR ?= 1800
build/fuzz/.ready: requirements/fuzz.txt
	$(PYTHON) -m venv build/fuzz
	build/fuzz/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/fuzz.txt
	build/fuzz/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

fuzz: build/fuzz/.ready ## feed every parser rubbish, guided by coverage (FOR=1800 seconds each)
	build/fuzz/bin/python fuzz/run.py --seconds $(FOR)

.venv/.docs: requirements/docs.txt $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/docs.txt
	@touch $@

docs: .venv/.docs ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

build/supply/.ready: requirements/supply.txt
	$(PYTHON) -m venv build/supply
	build/supply/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/supply.txt
	@touch $@

supply: setup build/supply/.ready ## what we ship: licences, bill of materials, known vulnerabilities
	build/supply/bin/python requirements/supply.py

lambda: setup ## the Lambda package and layer, for x86_64 and arm64
	$(BIN)/python deploy/lambda/build.py dist/lambda

build: setup ## wheel and sdist
	$(BIN)/python -m hatchling build

clean: ## remove what the other targets made
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
