# `make demo` and `make test` need nothing but Python 3.11 or later and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two OpenMP threads on a busy 2-core machine can be 30 times slower than one.
export OMP_NUM_THREADS := 1

.PHONY: help demo test lint exactness endurance bench clean

help:
	@echo "make demo       generate from a few built-in prompts on the embedded model"
	@echo "make test       the test suite, without the slow sweeps"
	@echo "make lint       ruff and mypy --strict"
	@echo "make exactness  the slow sweeps: every setting gives the oracle's ids"
	@echo "make endurance  every death of a rank, 20 times each, faults of a cluster, and all ring storms (hours)"
	@echo "make bench      planning, decode and verification figures on the embedded model"

demo: $(VENV)/.base
	$(BIN)/lockstep generate --config configs/demo.toml --tp 2

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

exactness: $(VENV)/.test
	$(BIN)/python -m pytest -m slow --ignore=tests/launch --ignore=tests/cluster --ignore=tests/runtime/test_ring_storm.py $(PYTEST_ARGS)

endurance: $(VENV)/.test
	$(BIN)/python -m pytest -m slow tests/launch tests/cluster tests/runtime/test_ring_storm.py $(PYTEST_ARGS)

bench: $(VENV)/.base
	$(BIN)/lockstep bench schedule --requests 256 --json
	$(BIN)/lockstep bench schedule --requests 16384 --json
	$(BIN)/lockstep bench decode --batch 1 --draft-tokens 0 --json
	$(BIN)/lockstep bench decode --batch 1 --draft-tokens 1 --json
	$(BIN)/lockstep bench decode --batch 32 --draft-tokens 1 --json
	$(BIN)/lockstep bench verify

# torch is pinned first: this exact version has a small CPU build, an open range may pull gigabytes of CUDA libraries.
$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
