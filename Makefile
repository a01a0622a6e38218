PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
OLDEST_TORCH := 2.11.0
# each worker begins with one half of the tests, in order: the tests of a file share what its fixtures compute
TWO_WORKERS := -n 2 --dist worksteal
# workers, and the programs that they start, share what one of them has compiled
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test quick mutation test-oldest demo lint docs bench results clean

# the documentation is built by tests/test_docs.py
test: lint
	$(BIN)/python -m pytest $(TWO_WORKERS)

# for the inner loop: the laws, the torch backend and the layers, uncompiled
quick: lint
	$(BIN)/python -m pytest $(TWO_WORKERS) -k "not compile" $(QUICK)

QUICK := tests/ops/test_backends.py tests/ops/test_checks.py tests/ops/test_laws.py tests/ops/test_state.py \
	tests/ops/test_torch_backend.py tests/ops/test_variant.py tests/baselines/test_attention_laws.py tests/nn \
	tests/test_imports.py tests/test_mutation.py tests/test_utils.py

# makes faults in a copy of the code, one at a time: each must fail a test
mutation: $(VENV)/installed
	$(BIN)/python tests/mutation.py

demo: $(VENV)/installed
	$(BIN)/flowformer demo

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/installed
	$(BIN)/flowformer bench attention

# the committed tables and page of our runs, with the runs below the folder RUNS added
results: $(VENV)/installed
	$(BIN)/flowformer results results/reproduce.csv results/reproduce.html results/lra-speed-h200.csv results/lra-speed-cpu.csv \
		$(RUNS) --out build/results > /dev/null
	cp build/results/results.csv results/reproduce.csv
	cp build/results/results.html results/reproduce.html
	cp build/results/results.md docs/results.md

# ops, nn and models with the oldest supported torch and its Triton, whose interpreter needs numpy < 2.4
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python -m pytest $(TWO_WORKERS) src/flowformer/ops src/flowformer/nn src/flowformer/models tests/ops tests/nn tests/models

# everything is installed again when the list of dependencies changes
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "flowformer needs Python 3.11 or newer; make PYTHON=/path/to/python3.11 test"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "venv is missing: on Debian, apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

$(OLDEST)/installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --editable ".[timm]" torch==$(OLDEST_TORCH) "numpy<2.4" \
		pytest pytest-xdist hypothesis safetensors onnx onnxscript onnxruntime
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
