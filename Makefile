# `make` lists the targets. Everything installs into .venv, from the pins of requirements-dev.txt alone.
#   PYTHON=python3.12   makes .venv with another interpreter (>= 3.11)
#   ARGS="-k pack"      more arguments for pytest, the benchmarks or the example

PYTHON ?= python3
BIN := .venv/bin
CPP := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh')
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: build  ## quantize a small network from end to end
	$(BIN)/python examples/quickstart.py $(ARGS)

test: build  ## run every test and doctest
	$(BIN)/python -m pytest -n auto --dist loadgroup --durations 5 $(ARGS)

bench: build  ## check bits, then measure the ops against their peers
	$(BIN)/python -m benchmarks $(ARGS)

style: .venv/done  ## format Python and C++ in place
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

quality: .venv/done  ## check style, types, layers and what the tree may hold; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --noconftest tests/test_layers.py tests/test_tree.py

build: .venv/package  ## compile the library and install the package into .venv, editable

clean:  ## remove what was built, measured and cached; .venv stays
	rm -rf build dist out *.egg-info .*_cache .hypothesis torch_linquant/*.so

.venv/done: requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: .venv needs Python >= 3.11. Pass PYTHON=python3.12 or the like."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --progress-bar off --requirement $<
	@touch $@

# Ninja decides what to compile.
torch_linquant/_C.so: .venv/done setup.py $(CPP)
	$(BIN)/python setup.py --quiet build_ext --inplace

.venv/package: torch_linquant/_C.so pyproject.toml
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

.PHONY: help demo test bench style quality build clean
.DEFAULT_GOAL := help
