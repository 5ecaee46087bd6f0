# Everything happens in a virtual environment here; nothing else on the machine is touched.

VENV ?= .venv
# The first of these programs that is Python 3.11 or newer, unless PYTHON is given.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BIN := $(VENV)/bin
# Tests that run at once, for two cores: some wait while others compute. Each takes up to 3 GB.
WORKERS ?= 3
TESTS = $(BIN)/python -m pytest -n $(WORKERS)
# An index that torch is installed from first; that of PyTorch's builds without CUDA saves some GB:
# make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
TORCH = $(if $(TORCH_INDEX),$(PIP) --index-url "$(TORCH_INDEX)" torch torchvision)
# Compiles with all cores; pip would use one. Files that are not for this Python are passed over.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-all coverage lint lock audit docs proto clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## install fedda and run a federation of four sites on this machine
	$(BIN)/fedda demo

test-fast: $(VENV)/.installed-dev ## run the tests that need no process: what one runs while writing
	$(TESTS) --ring fast

test: $(VENV)/.installed-dev ## install what the tests need and run the tests: every guarantee once
	$(TESTS) --ring gate --durations 50

test-all: $(VENV)/.installed-dev ## run every test there is, also those of the nightly workflow
	$(TESTS) --ring nightly --durations 50

coverage: $(VENV)/.installed-dev ## run the gate's tests, and name the files of which they run less than 60 %
	$(TESTS) --ring gate --cov --cov-report=
	@$(BIN)/coverage report --format=total | sed 's/.*/the tests run & % of the product/'
	@$(BIN)/coverage report --sort=cover | awk '$$NF ~ /%/ && $$1 != "TOTAL" && $$NF + 0 < 60 { print $$NF, $$1 }'

lint: $(VENV)/.installed-dev ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pyright

lock: $(VENV)/.installed ## renew the versions and hashes that the container image installs
	PATH="$(abspath $(BIN)):$$PATH" TORCH_INDEX="$(TORCH_INDEX)" deploy/lock.sh

audit: ## ask a public service for known holes in what the image installs; any is an error
	"$(PYTHON)" deploy/holes.py

docs: $(VENV)/.installed-dev ## build the documentation as a site in site/, offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# Generates the modules of exchange.proto again; needed only after a change of that file.
proto: $(VENV)/.installed-dev
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. fedda/exchange/exchange.proto

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "fedda needs Python 3.11 or newer, and none was found: install one, or name it by make PYTHON=/path/to/python"; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment: install its venv module (on Debian and Ubuntu: python3-venv)"; exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing fedda into $(VENV); the first time this downloads PyTorch and takes a few minutes"
	$(TORCH)
	$(PIP) --editable .
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing fedda and its test tools into $(VENV); the first time this takes a few minutes"
	$(TORCH)
	$(PIP) --editable '.[dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/.installed
