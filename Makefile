# make demo   create the environment, fetch the default model, run the demonstration
# make test   lint, type check and all tests
#
# TORCH is what pip is given for PyTorch. On Linux the plain package brings CUDA; for a CPU-only machine say
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2

.PHONY: demo test lint format clean
.DEFAULT_GOAL := demo

demo: $(READY)
	$(BIN)/hisparse demo --out out

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The mark is written last, so an interrupted installation is taken up again.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'error: $(PYTHON) is older than Python 3.11; say make PYTHON=/path/to/python3.11'; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
