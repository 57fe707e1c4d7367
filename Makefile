# Every target sets up what it needs: uv, Python 3.12 or newer, .venv and all packages. See scripts/setup.sh.
PYTHON := .venv/bin/python
TEST_WORKERS ?= 2
ARGS ?=

# One thread for each test worker: more would only fight over the cores.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1

# Compiling torch anew in every process of the tests would take most of their time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup test test-slow demo demo-labels check format clean

help:
	@echo 'make setup      build .venv (the other targets do it themselves)'
	@echo 'make test       run the tests; ARGS="-k returns" selects, TEST_WORKERS=4 widens'
	@echo 'make test-slow  run the tests that take minutes'
	@echo 'make demo       the closed loop in simulation: a policy improves on its own experience, beside baselines'
	@echo 'make demo-labels  two small datasets with video, taken from recording to advantage labels'
	@echo 'make check      format, lint, types and import layers, changing nothing'
	@echo 'make format     rewrite the code as the formatter and the linter can'
	@echo 'make clean      remove .venv, .uv, .vllm and every cache'

setup:
	@sh scripts/setup.sh

test: setup
	$(PYTHON) -m pytest -n $(TEST_WORKERS) $(ARGS)

test-slow: setup
	$(PYTHON) -m pytest -n $(TEST_WORKERS) -m slow $(ARGS)

demo: setup
	sh examples/improve_demo.sh runs/demo

demo-labels: setup
	sh examples/demo.sh

check: setup
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pyright
	.venv/bin/lint-imports

format: setup
	$(PYTHON) -m ruff check --fix-only .
	$(PYTHON) -m ruff format .

clean:
	rm -rf .venv .uv .vllm build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
