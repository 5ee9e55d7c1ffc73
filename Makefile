# Everything happens in .venv; `make` builds it once and again only when what it depends on changes.
PYTHON ?= python3
ARGS ?=
VENV := .venv
STAMP := $(VENV)/.installed
# Tests and the demo start ranks by the mpiexec that lies in there.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Several ranks share the cores of one machine: one thread each is the fastest.
export OMP_NUM_THREADS ?= 1
# Tests of one process run side by side; those of several ranks have the cores to themselves.
WORKERS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all check lint types imports docs format clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## Create .venv with everything in it; does nothing when it is there

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: '$(PYTHON)' is not Python 3.11 or later; install one and name it:" \
	    "make install PYTHON=python3.11" >&2; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time this downloads PyTorch and takes minutes"
	@$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP) ## Train the same model three ways and compare (ARGS="--help" for options)
	@$(VENV)/bin/tonari demo $(ARGS)

test: $(STAMP) ## Run the tests that are quick, in minutes (ARGS="-k name" for some)
	@status=0; \
	$(VENV)/bin/pytest -n $(WORKERS) --dist worksteal \
	  -m "(smoke or not thorough) and not (multirank or slow or lab)" $(ARGS) || status=$$?; \
	$(VENV)/bin/pytest -m "multirank and smoke and not (slow or lab)" $(ARGS) || status=$$?; \
	exit $$status

test-all: $(STAMP) ## Run all tests, on many ranks and under many kills too
	@status=0; \
	$(VENV)/bin/pytest -n $(WORKERS) --dist worksteal -m "not (multirank or slow or lab)" $(ARGS) \
	  || status=$$?; \
	$(VENV)/bin/pytest --durations=60 -m "multirank and not (slow or lab)" $(ARGS) || status=$$?; \
	exit $$status

check: lint types imports docs test-all ## All of CI: format, lint, types, import contracts, site, tests

lint: $(STAMP) ## Check format and lint
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/ruff check

types: $(STAMP) ## Check types, strictly
	@$(VENV)/bin/mypy

imports: $(STAMP) ## Check who may import whom
	@$(VENV)/bin/lint-imports

docs: $(STAMP) ## Build the site into build/site, and check its links
	@# Not --quiet: warnings that are not printed do not fail a strict build.
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

format: $(STAMP) ## Format, and fix what can be fixed
	@$(VENV)/bin/ruff format
	@$(VENV)/bin/ruff check --fix

clean: ## Remove .venv and every cache
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
