# All but test-old, trainer-old and trainer-new happens in .venv; `make` builds it once, and again
# only when what it depends on changes.
PYTHON ?= python3
ARGS ?=
VENV := .venv
STAMP := $(VENV)/.installed
# The oldest set, for the packages that need no new torch. Its torch has wheels up to Python 3.12.
OLD_VENV := .venv-old
OLD_STAMP := $(OLD_VENV)/.installed
OLD_PYTHON ?= $(shell python3.10 -c "import sys; print(sys.executable)" 2>/dev/null || echo $(PYTHON))
# The README's loop, the tutorial's, that of the example and of `tonari init`.
LOOPS := tests/docs/test_readme.py tests/docs/test_loops.py
OLD_TESTS := tests/dataio tests/shuffle tests/importance tests/faults $(LOOPS) \
  --ignore=tests/faults/test_kill.py --ignore=tests/faults/test_run_faults.py \
  --deselect=tests/faults/test_bad_input.py::test_wrong_settings_are_refused \
  --deselect=tests/faults/test_bad_input.py::test_launchers_that_disagree_are_refused # of the trainer too
TRAINER_TESTS := tests/trainer
# The part of it that CI runs: what calls NumPy, Arrow and torch most.
OLD_IN_CI := $(LOOPS) tests/dataio/job tests/dataio/source tests/dataio/plan tests/dataio/rows tests/shuffle tests/importance
# 0: `make check` leaves it out; 1: a set that cannot be installed is an error; auto: it is reported.
OLD ?= auto
# Tests and the demo start ranks by the mpiexec that lies in there.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Several ranks share the cores of one machine: one thread each is the fastest.
export OMP_NUM_THREADS ?= 1
# What `make check` runs beside the tests, the quickest first.
BESIDE := imports docs types old
BESIDE_LOGS := build/beside
# Tests that run side by side; those of several ranks leave cores idle while one waits for another.
WORKERS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Else each of the hundreds of processes that tests start compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-ci test-all test-old old trainer-old \
  trainer-new check lint types imports docs beside failed-beside format clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## Create .venv with everything in it; does nothing when it is there

$(STAMP): pyproject.toml setup.py dataio/rows/pictures.c constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: '$(PYTHON)' is not Python 3.11 or later; install one and name it:" \
	    "make install PYTHON=python3.11" >&2; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time this downloads PyTorch and takes minutes"
	@$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP) ## Train the same model three ways and compare (ARGS="--help" for options)
	@$(VENV)/bin/tonari demo $(ARGS)

test: TAKEN := (smoke or not (thorough or multirank)) and not (nightly or slow or lab)
# What is not marked thorough but took long when durations were stored last: left to test-ci too.
QUICK := --quicker-than 1
test: QUICKER := $(QUICK)
test-ci: TAKEN := not (nightly or slow or lab)
# Ranks are forked where a person waits; before a release each one starts anew.
test test-ci: FORKED := --forked
test-all: TAKEN := not (slow or lab)

test: ## Run the tests that are quick, in 5 minutes (ARGS="-k name" for some)
test-ci: ## Run the tests of CI, which hold every guarantee, in half an hour
test-all: ## Run all tests, with more cases, meshes and kills of each guarantee: for every release

test test-ci test-all: $(STAMP)
	@$(VENV)/bin/pytest -n $(WORKERS) --dist worksteal --durations=30 -m "$(TAKEN)" \
	  $(QUICKER) $(FORKED) $(ARGS)

test-old: $(OLD_STAMP) ## Run the quick tests that need no trainer on the oldest torch, NumPy and Python
	@PATH="$(CURDIR)/$(OLD_VENV)/bin:$$PATH" $(OLD_VENV)/bin/pytest -n $(WORKERS) --dist worksteal \
	  -m "not (thorough or multirank or slow or lab)" $(OLD_TESTS) $(ARGS)

$(OLD_STAMP): pyproject.toml constraints-old.txt
	@$(OLD_PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' || { \
	  echo "make: '$(OLD_PYTHON)' is not a Python that the oldest torch has wheels for, expected" \
	    "3.10 to 3.12; install one and name it: make test-old OLD_PYTHON=python3.10" >&2; exit 1; }
	@test -x $(OLD_VENV)/bin/python || $(OLD_PYTHON) -m venv $(OLD_VENV)
	@echo "Installing the oldest set into $(OLD_VENV); the first time this downloads about 3 GB"
	@# INT, so that pip removes what it has downloaded.
	@timeout --foreground -s INT 15m \
	  $(OLD_VENV)/bin/python -m pip install --quiet -c constraints-old.txt \
	  -e ".[cli,hdf5,images,mpi-bundled,test,text,tfrecord]" || { rm -rf $(OLD_VENV); \
	  echo "make: in 15 minutes pip did not install constraints-old.txt for '$(OLD_PYTHON)' (see" \
	    "above); give it an index that is near and has these versions, such as" \
	    "PIP_EXTRA_INDEX_URL=URL of wheels of torch 2.4 without CUDA, or leave it out:" \
	    "make check OLD=0" >&2; exit 1; }
	@touch $@

old: ## Run the part of test-old that CI runs, on 3 GB that it downloads (OLD=0: none of it)
	@if [ "$(OLD)" != 0 ] && $(MAKE) -s --no-print-directory $(OLD_STAMP); then \
	  $(MAKE) --no-print-directory test-old OLD_TESTS="$(OLD_IN_CI) $(QUICK)"; \
	elif [ "$(OLD)" = 1 ]; then exit 1; \
	else echo "make: left out: the tests on the oldest versions" >&2; fi

# Both ends of the range in tonari/trainer/torch_range.py. What needs torchvision is skipped.
trainer-old: TORCH := 2.11.0
trainer-new: TORCH := 2.15.0
trainer-old: ## Run the trainer's tests on the oldest torch that it takes
trainer-new: ## Run the trainer's tests on the newest torch that it takes

trainer-old trainer-new:
	@test -e .venv-$@/.installed || { \
	  echo "Installing torch $(TORCH) into .venv-$@; this may download 3 GB, and takes 6 of the disk" && \
	  $(PYTHON) -m venv .venv-$@ && grep -vE '^(torch|torchvision|setuptools)==' constraints.txt \
	    > .venv-$@/constraints.txt && .venv-$@/bin/python -m pip install --quiet \
	    -c .venv-$@/constraints.txt torch==$(TORCH) -e ".[all,hf,test]" && touch .venv-$@/.installed; }
	@PATH="$(CURDIR)/.venv-$@/bin:$$PATH" .venv-$@/bin/pytest -n $(WORKERS) --dist worksteal \
	  -m "not (nightly or slow or lab)" $(TRAINER_TESTS) $(ARGS)

check: lint ## All of CI: format and lint, then imports, site, types and oldest versions beside tests
	@rm -rf $(BESIDE_LOGS)
	@$(MAKE) --no-print-directory --keep-going -j2 beside test-ci || \
	  { $(MAKE) --no-print-directory failed-beside; exit 1; }
	@test -e $(OLD_STAMP) || echo "make: all checked but for the oldest versions (see 'left out'" \
	  "above; with OLD=1 that is an error)" >&2

# One after the other, in the time that the tests leave the cores idle. What each writes is kept
# apart from the tests' own lines: shown whole where it fails, at once and at the end.
beside: $(STAMP)
	@mkdir -p $(BESIDE_LOGS); failed=0; for each in $(BESIDE); do \
	  if nice $(MAKE) --no-print-directory $$each WORKERS=1 >$(BESIDE_LOGS)/$$each 2>&1; then \
	    grep '^make: left out' $(BESIDE_LOGS)/$$each || echo "make: $$each: passed"; \
	    mv $(BESIDE_LOGS)/$$each $(BESIDE_LOGS)/$$each.passed; \
	  else failed=1; cat $(BESIDE_LOGS)/$$each; echo "make: $$each: failed, see above" >&2; fi; \
	done; exit $$failed

failed-beside:
	@for each in $(BESIDE); do test ! -e $(BESIDE_LOGS)/$$each || \
	  { cat $(BESIDE_LOGS)/$$each; echo "make: $$each: failed, see above" >&2; }; done

lint: $(STAMP) ## Check format and lint
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/ruff check

types: $(STAMP) ## Check types, strictly
	@$(VENV)/bin/mypy

imports: $(STAMP) ## Check who may import whom
	@$(VENV)/bin/lint-imports

docs: $(STAMP) ## Build the site into build/site; check its links, names and long sentences
	@# Not --quiet: warnings that are not printed do not fail a strict build.
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

format: $(STAMP) ## Format, and fix what can be fixed
	@$(VENV)/bin/ruff format
	@$(VENV)/bin/ruff check --fix

clean: ## Remove .venv and every cache
	rm -rf $(VENV) $(OLD_VENV) .venv-trainer-* build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
