# make demo, make test: each makes .venv when missing, installs, runs. Nothing else is needed but Python 3.12 and a C++17 compiler.
PYTHON ?= $(firstword $(foreach p,python3.12 python3 python3.13 python3.14,$(if $(shell $(p) -c 'import sys; print(int(sys.version_info >= (3, 12)))' 2>/dev/null | grep 1),$(p))))
CXX_FOUND := $(shell command -v $(CXX) 2>/dev/null || command -v g++ 2>/dev/null || command -v clang++ 2>/dev/null)
BIN := .venv/bin

# Without a GPU, JAX is kept from looking for one; with one, its CUDA libraries are installed too.
GPU := $(shell ls /dev/nvidia0 2>/dev/null || nvidia-smi -L 2>/dev/null | grep -m 1 '^GPU')
ifeq ($(GPU),)
export JAX_PLATFORMS := cpu
EXTRAS := test
else
EXTRAS := test,cuda13
endif

FFI_SOURCES := $(wildcard ffi/*.cc ffi/*.cu ffi/*.h) ffi/CMakeLists.txt
FORMATTED := $(filter %.cc %.cu %.h,$(FFI_SOURCES)) $(wildcard tests/cuda_on_cpu/*)
INSTALLED := .venv/.installed-$(if $(GPU),gpu,cpu)
PYTEST_ARGS ?=

.PHONY: demo test install lint format build-file clean

demo: install
	@$(BIN)/python scripts/generate.py

test: lint
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --durations=10 $(PYTEST_ARGS)

install: $(INSTALLED)

# Editable, so only the build's own inputs make it anew; an import never does.
$(INSTALLED): pyproject.toml $(FFI_SOURCES) | .venv
	@$(if $(CXX_FOUND),:,$(error no C++ compiler found: install g++ or clang++, or name one with CXX=))
	@echo "installing hisparse-jax[$(EXTRAS)] into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

.venv:
	@$(if $(PYTHON),:,$(error no Python 3.12 or newer found: install python3.12, or name one with PYTHON=))
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "$(PYTHON) cannot make a virtual environment: install its venv module (python3.12-venv)"; exit 1; }

lint: install
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "not formatted: make format"; exit 1; }
	@$(BIN)/clang-format --dry-run --Werror $(FORMATTED)
	@$(BIN)/pyright

format: install
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(FORMATTED)

build-file: install
	@$(BIN)/python scripts/update_build.py

clean:
	rm -rf .venv build dist .cache .pytest_cache .ruff_cache .hypothesis
