# Three commands do everything on a fresh machine: `make train`, `make test` and `make serve`. See also `make help`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
PYTEST := $(BIN)/python -m pytest

# A stamp is named after the extras that it has installed. Training needs few: what is installed for more is enough.
ALL := $(VENV)/.installed-cli,data,hf,images,log,serve,dev
TRAIN := $(or $(wildcard $(ALL)),$(VENV)/.installed-cli)
SERVE := $(or $(wildcard $(ALL)),$(VENV)/.installed-cli,serve)

# Python keeps the files that it has compiled, so processes start faster. Some containers forbid it by this variable.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install train serve test test-gpu check soak bench format clean

help:            ## list the commands
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(ALL)  ## make .venv with weft and all it needs to train and test

# torch exactly: without it, a looser requirement pulls the CUDA build and gigabytes with it.
$(VENV)/.installed-%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" --editable ".[$*]"
	touch $@

train: $(TRAIN)  ## the main job: plan, prove, train, save and sample a small Llama on 4 processes
	$(BIN)/weft train examples/quickstart.toml

serve: $(SERVE)  ## the model that `make train` trained, at http://127.0.0.1:8000 (OpenAI's API, and a page to try it)
	test -d runs/quickstart/checkpoints || $(BIN)/weft train examples/quickstart.toml
	$(BIN)/weft serve runs/quickstart

test: install    ## every test, of many cases a sample, in three processes (about 15 minutes on 2 slow cores)
	$(PYTEST) --numprocesses 3 --dist loadfile

# With the python that has CUDA's torch, pytest, pytest-xdist and hypothesis: .venv has the CPU's.
# PART=axes, stages, device, training, failures, serving, lean, communication, ranks_per_device or recurrent_runs.
# All parts take some ten minutes on an H200 (docs/gpus.md).
test-gpu:        ## every CUDA path through the commands, on a machine with a GPU; skipped with a reason elsewhere
	$(PYTHON) -m pytest tests/gpu$(if $(PART),/test_$(PART).py) --numprocesses 6 --dist loadgroup \
		--results benchmarks/results/test-gpu$(if $(PART),-$(PART)).json

# mypy runs beside the tests; when one of them fails, the other goes on to its end.
check: install   ## format, lint, types and the tests that start no process
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy & types=$$!; \
	$(PYTEST) -x -m "not processes" --numprocesses 2 --dist loadfile; tests=$$?; \
	wait $$types && exit $$tests

soak: install    ## the exhaustive versions of sampled tests
	$(PYTEST) -m soak

bench: install   ## the benchmarks that run on this machine; results in benchmarks/results
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/peers_experts.py
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
