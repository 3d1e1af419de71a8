# `make demo` and `make test` set everything up by themselves: a virtual environment in .venv, with the versions of
# constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-app test-export test-lowest lint links benchmark clean

demo: .venv/demo
	HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py

test: lint
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

# The exporters and their runtimes have an environment of their own: `make test` needs none of them.
test-export: .venv-export/installed
	HF_HUB_OFFLINE=1 .venv-export/bin/python -m pytest tests/deployment

.venv-export/installed: setup.cfg pyproject.toml constraints.txt
	test -x .venv-export/bin/python || $(PYTHON) -m venv .venv-export
	.venv-export/bin/pip install --quiet --constraint constraints.txt --editable ".[onnx,openvino]" pytest
	touch $@

# The page of examples/app.py in a browser, in an environment of its own: .venv-app.
test-app: .venv-app/installed
	HF_HUB_OFFLINE=1 .venv-app/bin/python -m pytest -rs tests/app

# The quick tests with the oldest versions that setup.cfg allows.
test-lowest: .venv/lowest/installed
	HF_HUB_OFFLINE=1 .venv/lowest/bin/python -m pytest -m "not slow"

# Rules of transformers' linter that are not ours:
# TRF041: a branch on the config must name the checkpoints that take it. Users make their own configs here.
# TRF057: docstrings must be made by `@auto_docstring`, from tables inside transformers. Ours say it themselves.
NOT_OURS := TRF041|TRF057

# mypy sees the package as setup.cfg lays it out.
lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf .venv/lint && mkdir -p .venv/lint/adaperceiver
	sed -E '/^\[rules\.($(NOT_OURS))\]/,/^default_enabled/s/^default_enabled = true/default_enabled = false/' \
	    "$$($(BIN)/python -c 'import mlinter; print(mlinter.__path__[0])')/rules.toml" > .venv/lint/rules.toml
	$(BIN)/mlinter --no-progress --rules-toml .venv/lint/rules.toml modeling configuration
	ln -s $(CURDIR)/modeling/*.py $(CURDIR)/configuration $(CURDIR)/modeling/training $(CURDIR)/modeling/evaluation \
	    $(CURDIR)/modeling/deployment .venv/lint/adaperceiver/
	cd .venv/lint && ../bin/mypy --config-file ../../pyproject.toml -p adaperceiver

# The folders in checkpoints/ load as from the hub; a new one gets links to the code.
links: .venv/installed
	$(BIN)/python -c "from pathlib import Path; from adaperceiver.hub_adaperceiver import link_sources; \
	    [link_sources(path.parent) for path in Path('checkpoints').glob('*/config.json')]"

benchmark: .venv/installed
	$(BIN)/python examples/benchmark.py

# The demo needs less than the tests do.
.venv/demo: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[plot]"
	touch $@

.venv/installed: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@ .venv/demo

.venv-app/installed: setup.cfg pyproject.toml constraints.txt
	test -x .venv-app/bin/python || $(PYTHON) -m venv .venv-app
	.venv-app/bin/pip install --quiet --constraint constraints.txt --editable ".[app]" pytest selenium
	touch $@

.venv/lowest/installed: setup.cfg pyproject.toml
	test -x .venv/lowest/bin/python || $(PYTHON) -m venv .venv/lowest
	sed -nE 's/^ +([a-zA-Z0-9_-]+)>=([0-9.]+).*/\1==\2/p' setup.cfg > .venv/lowest/lowest.txt
	.venv/lowest/bin/pip install --quiet --constraint .venv/lowest/lowest.txt --editable ".[test]"
	touch $@

clean:
	rm -rf .venv .venv-app .venv-export build dist *.egg-info
