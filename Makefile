PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test demo lint bench clean

test: lint
	$(BIN)/python -m pytest -n 2

demo: $(VENV)/installed
	$(BIN)/flowformer demo

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/flowformer bench attention

# everything is installed again when the list of dependencies changes
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "flowformer needs Python 3.11 or newer; make PYTHON=/path/to/python3.11 test"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "venv is missing: on Debian, apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
