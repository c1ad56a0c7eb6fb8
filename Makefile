# make demo: install from this checkout into .venv, with a CPU OpenCL runtime, train a CNN on handwritten digits, write a report
# make test: the same with the development tools; everything CI checks
# make test-full: the same on every CPU runtime, with every op in every dtype and every kernel; hours on two cores
# make quick: the inner loop
# make site: the pages of docs/ as a site, in build/site

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: demo test test-full quick lint docs-tables site clean

demo: $(VENV)/.cpu
	-$(BIN)/netcl doctor
	$(BIN)/netcl selftest relu
	$(BIN)/netcl train --data digits --model cnn --run runs/demo --overwrite

# Threads of NumPy that wait by spinning would take the cores from the other jobs.
test test-full quick: export OPENBLAS_NUM_THREADS := 1

test: lint
	$(BIN)/pytest -n $(JOBS)

test-full: lint
	$(BIN)/pytest -n $(JOBS) --full

quick: $(VENV)/.dev
	NETCL_TEST="$${NETCL_TEST:-pocl,numpy}" $(BIN)/pytest -x -q -n $(JOBS) -m "not slow"

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs-tables: $(VENV)/.dev
	$(BIN)/python tools/docs_tables.py
	$(BIN)/python tools/op_stubs.py

site: $(VENV)/.docs
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/site

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: netcl needs Python 3.10 or newer; name one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "make: this Python cannot make environments; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

# One stamp per extra: pip runs again only after pyproject.toml has changed.
$(VENV)/.cpu $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build dist runs/demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
