# Two commands do everything on a fresh machine: `make train` and `make test`. See also `make help`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH ?= torch==2.13.0
PYTEST := $(BIN)/python -m pytest

.PHONY: help install train test test-gpu check soak bench format clean

help:            ## list the commands
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## make .venv with weft and all it needs to train and test

# torch first and exactly: without it, a looser requirement pulls the CUDA build and gigabytes with it.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[cli,data,hf,images,log,dev]"
	touch $(STAMP)

train: install   ## the main job: plan, prove, train, save and sample a small Llama on 4 processes
	$(BIN)/weft train examples/quickstart.toml

test: install    ## every test, of many cases a sample, in three processes (about 22 minutes on 2 slow cores)
	$(PYTEST) --numprocesses 3 --dist loadfile

# With the python that has CUDA's torch, pytest, pytest-xdist and hypothesis: .venv has the CPU's.
# PART=axes, stages, training or failures: each takes a few minutes on an H200.
test-gpu:        ## every CUDA path through the commands, on a machine with a GPU; skipped with a reason elsewhere
	$(PYTHON) -m pytest tests/gpu$(if $(PART),/test_$(PART).py) --numprocesses 6 --dist loadgroup \
		--results benchmarks/results/test-gpu$(if $(PART),-$(PART)).json

check: install   ## format, lint, types and the tests that start no process
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -x -m "not processes" --numprocesses 2 --dist loadfile

soak: install    ## the exhaustive versions of sampled tests
	$(PYTEST) -m soak

bench: install   ## the benchmarks that run on this machine; results in benchmarks/results
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/save_stall.py
	$(BIN)/python benchmarks/chaos.py
	$(BIN)/python benchmarks/shadow.py

format: install  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:           ## remove the environment, runs and caches
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
