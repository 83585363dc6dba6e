# `make demo` and `make test` need Python >= 3.11 with its headers, make and gcc >= 11.2 (or clang >= 14); everything else goes into .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# meson-python and the editable install look for meson and ninja on PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)
NATIVE := build/native
# Imported once before, as that rebuilds the engine where its sources changed: workers of one run would all do it at the same time.
PYTEST := $(BIN)/python -c 'import colibri.native' && $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-native test-python test-all test-oracle test-compilers test-sanitizers test-aarch64 lint format bench clean

help: ## say what there is
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(VENV)/run.stamp ## a conversation that survives kill -9, on the embedded model
	@$(BIN)/colibrictl demo

test: test-native test-python ## everything that is fast: the engine on its own, then Python

test-native: $(VENV)/test.stamp ## the engine's own tests, built without Python
	@test -f $(NATIVE)/build.ninja || $(BIN)/meson setup $(NATIVE) -Dwerror=true >/dev/null
	$(BIN)/meson test -C $(NATIVE) --print-errorlogs

test-python: $(VENV)/test.stamp ## the Python tests
	$(PYTEST) -n auto -m "not slow and not oracle"

test-oracle: $(VENV)/oracle.stamp ## live comparison with transformers (installs torch)
	$(PYTEST) -n auto -m "oracle and not slow"

test-all: test-native $(VENV)/oracle.stamp ## every test, slow ones too
	$(PYTEST) -n auto

test-compilers: $(VENV)/run.stamp ## the engine by gcc 11, by clang 14, and without AVX-512
	tools/test_builds.sh compilers

test-sanitizers: $(VENV)/run.stamp ## the engine under address, undefined-behaviour and thread sanitizers
	tools/test_builds.sh sanitizers

test-aarch64: $(VENV)/run.stamp ## the engine cross-built for 64-bit ARM, under qemu
	tools/test_builds.sh aarch64

lint: $(VENV)/lint.stamp ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/typecheck.py

format: $(VENV)/lint.stamp ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/run.stamp ## kernels of this machine: operations and bytes per second
	@test -f build/bench/build.ninja || $(BIN)/meson setup build/bench --buildtype=release >/dev/null
	$(BIN)/meson test -C build/bench --benchmark --verbose

clean: ## remove the environment and all builds
	rm -rf $(VENV) build

# One stamp a layer: an environment is made once and topped up only with what a target needs.
$(VENV)/base.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "colibri needs Python 3.11 or later: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip >= 25.1'
	touch $@

$(VENV)/run.stamp: $(VENV)/base.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet --group build
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[daemon]'
	touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	$(BIN)/python -m pip install --quiet --group test
	touch $@

$(VENV)/oracle.stamp: $(VENV)/test.stamp
	$(BIN)/python -m pip install --quiet --group oracle
	touch $@

$(VENV)/lint.stamp: $(VENV)/run.stamp
	$(BIN)/python -m pip install --quiet --group lint
	touch $@
