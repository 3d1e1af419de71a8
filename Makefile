# `make demo` and `make test` set everything up by themselves: a virtual environment in .venv, with the versions of
# constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint benchmark clean

demo: .venv/installed
	$(BIN)/python examples/demo.py

test: lint
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

benchmark: .venv/installed
	$(BIN)/python examples/benchmark.py

.venv/installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
