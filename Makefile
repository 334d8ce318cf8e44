# Every target sets up what it needs. `make help` lists them.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
CACHE := $(CURDIR)/$(VENV)/cache
LOCK := requirements/cpu-dev.txt
PYPROJECTS := $(wildcard core/pyproject.toml plugins/*/pyproject.toml examples/*/pyproject.toml)
DISTS := $(patsubst %/pyproject.toml,./%,$(PYPROJECTS))
PIP := $(BIN)/python -m pip install -qq --no-cache-dir --no-compile --disable-pip-version-check
PIP += --no-warn-conflicts
# Two processes; tests of one group, which share an engine, run in one of them.
TWO := -n 2 --dist loadgroup

# What a run writes stays under .venv/cache.
export XDG_CACHE_HOME := $(CACHE)
export XDG_CONFIG_HOME := $(CACHE)/config
export CUDA_CACHE_PATH := $(CACHE)/cuda
export FLASHINFER_WORKSPACE_BASE := $(CACHE)/flashinfer
export HF_HOME := $(CACHE)/huggingface
export MPLCONFIGDIR := $(CACHE)/matplotlib
export NUMBA_CACHE_DIR := $(CACHE)/numba
export OUTLINES_CACHE_DIR := $(CACHE)/outlines
export TIKTOKEN_CACHE_DIR := $(CACHE)/tiktoken
export TIKTOKEN_RS_CACHE_DIR := $(CACHE)/tiktoken-rs
export TORCH_HOME := $(CACHE)/torch
export TORCHINDUCTOR_CACHE_DIR := $(CACHE)/inductor
export TRITON_HOME := $(CACHE)/triton
export TRITON_CACHE_DIR := $(CACHE)/triton/cache
export VLLM_CACHE_ROOT := $(CACHE)/vllm
export VLLM_CONFIG_ROOT := $(CACHE)/config/vllm

# Packages are installed without bytecode (quicker) and compiled when first imported.
unexport PYTHONDONTWRITEBYTECODE

# Nothing is fetched or reported at run time.
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

export VLLM_LOGGING_LEVEL ?= ERROR

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test test-all soak lint clean

help:
	@echo "make venv      the development environment, in $(VENV)"
	@echo "make demo      a trainer pushes weights into a real vLLM engine (ARGS='--tp 2')"
	@echo "make test      all tests but the slow ones (ARGS='-k registry')"
	@echo "make test-all  all tests"
	@echo "make soak      300 rounds, a random fault in every third (VLLM_WT_SOAK_SEED=n)"
	@echo "make lint      ruff and mypy"
	@echo "make clean     remove what these targets have made"

venv: $(STAMP)

$(STAMP): $(LOCK) $(PYPROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: the CPU lock needs Python 3.11 or later; set PYTHON=python3.N" >&2; exit 1; }
	@rm -f $@
	@echo "venv: $$($(PYTHON) --version) in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(CACHE)
	@echo "venv: torch"
	@$(PIP) -c $(LOCK) "$$(grep '^torch==' $(LOCK))"
	@echo "venv: the packages in $(LOCK)"
	@$(PIP) --no-deps -r $(LOCK)
	@echo "venv: $(DISTS)"
	@$(PIP) --no-deps --no-build-isolation $(addprefix -e ,$(DISTS))
	@echo "venv: first import"
	@said=$$($(BIN)/python -c 'import nixl_cu13; from vllm import LLM' 2>&1) || \
	    { echo "$$said" >&2; exit 1; }
	@touch $@

demo: venv
	@$(BIN)/vllm-wt demo $(ARGS)

test: venv
	$(BIN)/pytest $(TWO) -m "not slow" $(ARGS)

test-all: venv
	$(BIN)/pytest $(TWO) $(ARGS)

soak: venv
	$(BIN)/pytest tests/e2e/test_soak.py $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .whl
	rm -rf $(foreach d,. $(DISTS),$(d)/build $(d)/dist)
	find . -path ./.git -prune -o -type d \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +
