# make demo   everything end to end, into out/
# make test   lint, types and the whole test suite
# make bench  pass times beside Inductor's, see benchmarks/README.md
# make docs   the pages that are generated from the code
#
# The first call makes .venv; PYTHON says from which interpreter (3.10 or newer). Nothing here needs an NPU.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
READY := $(VENV)/.ready
TORCH := 2.13.0

# torch would import torch_npu as a device backend while it is being imported itself, and that fails without CANN.
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint types bench docs clean

help:
	@sed -n 's/^# make/make/p' Makefile

venv: $(READY)

# torch comes first and alone: with the exact version settled, no other package's wishes choose its build.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=68" wheel
	$(BIN)/python -m pip install --quiet torch==$(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[offline,hf,report,test]"
	touch $@

demo: $(READY)
	$(BIN)/mla-fusion demo

lint: $(READY)
	$(BIN)/ruff check .

# meta/ and converters/ are mapped into the package when it is installed; links show mypy the same tree.
types: $(READY)
	rm -rf build/types && mkdir -p build/types/mla_fusion
	ln -s $(CURDIR)/mla_fusion/* $(CURDIR)/meta $(CURDIR)/converters build/types/mla_fusion/
	cd build/types && $(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p mla_fusion

test: lint types
	$(BIN)/python -m pytest

bench: $(READY)
	$(BIN)/python benchmarks/pass_time.py --json benchmarks/out/pass_time.json

docs: $(READY)
	$(BIN)/python docs/generate.py

clean:
	rm -rf build dist out $(VENV)
