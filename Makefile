# `make quickstart` and `make test` set everything up by themselves; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := help
.PHONY: help install quickstart quickstart-small check check-static format lint types arrows test test-fast cases torture bench clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# pip's wheel cache and index are the user's own; constraints.txt pins the tested set.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tangolm needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

install: $(VENV)/.installed  ## create .venv and install the package with everything the tests need

quickstart: install  ## train TANGO and a Loop Transformer++ on real questions and write a report (minutes)
	$(BIN)/tangolm quickstart --out runs/quickstart

quickstart-small: install  ## the same in about a minute
	$(BIN)/tangolm quickstart --small --out runs/quickstart-small

check: check-static test-fast  ## format, lint, types, arrows, fast tests: under 3 minutes

check-static: install format lint types arrows

format: install
	$(BIN)/ruff format --check .

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/basedpyright

arrows: install
	$(BIN)/lint-imports --no-logo

test-fast: install
	$(BIN)/python -m pytest -n auto -m "not slow"

test: install  ## every test, one process a core
	$(BIN)/python -m pytest -n auto --dist loadgroup

cases: install  ## the test behind each situation of docs/cases.md; fails where one is missing
	$(BIN)/python -m tests.cases

torture: install  ## kill runs and fill their disk, again and again: they end on the same bits (minutes; Linux)
	$(BIN)/python -m tests.torture 1 2

bench: install  ## the operation against its naive form, with the bars
	$(BIN)/tangolm bench op --check

clean:  ## remove the environment and caches, keep runs
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
