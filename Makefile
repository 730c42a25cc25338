# Everything is built on `venv`: a fresh clone needs python3 (3.11 or newer) and make, nothing else.
#
#   make demo    the built-in model, serial against continuous: where do they diverge?
#   make test    the first tier of the tests, minutes on two cores: each capability with its injected fault. Tests of torch
#                and of llama.cpp are skipped, unless EXTRAS=dev,gguf,torch,llama installs them (torch on Linux: several GB).
#                CI=1 runs all: more seeds, sizes, models and places of the same kind, and real weights (fetched once, kept in
#                ~/.cache/detdiff); DETDIFF_TEST_FULL=1 also those of half an hour. docs/testing.md says more
#   make check   lint, format, types, all tests
#   make docs    writes the pages and golden reports that are made from the code (the tests check that they are up to date)
#   make bench   the measurements of docs/performance.md
#   make clean   removes what the above made, the environment included

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev,gguf
CONSTRAINTS ?=
COMMA := ,
STAMP := $(VENV)/installed-$(subst $(COMMA),-,$(EXTRAS))
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)

.PHONY: venv demo test lint types check docs bench clean
.DEFAULT_GOAL := demo
.DELETE_ON_ERROR:

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("detdiff needs Python 3.11 or newer and $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12 venv" % v[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo '$(PYTHON) cannot make virtual environments: on Debian and Ubuntu, install the package python3-venv.' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[$(EXTRAS)]'
	@touch $@

demo: venv
	@$(BIN)/detdiff demo

test: venv
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: venv
	$(BIN)/mypy

check: lint types test

docs: venv
	$(BIN)/python tools/cli_docs.py
	$(BIN)/python tools/profile_docs.py
	$(BIN)/python tools/kernel_docs.py
	$(BIN)/python tools/verdict_matrix.py --rules
	$(BIN)/python tools/golden_reports.py

bench: venv
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
