# Two commands do all set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# torch_npu is installed beside a torch without CANN; left to itself, `import torch` would try to load it.
export TORCH_DEVICE_BACKEND_AUTOLOAD = 0

.PHONY: demo test lint types bench docs clean

demo: $(VENV)/.ready
	$(BIN)/mla-fusion demo --out out

test: $(VENV)/.ready lint types
	$(BIN)/pytest -q

lint: $(VENV)/.ready
	$(BIN)/ruff check .

# mypy sees the packages where an installation puts them: meta/ and converters/ under mla_fusion/.
types: $(VENV)/.ready
	rm -rf build/types && mkdir -p build/types
	cp -r mla_fusion build/types/ && cp -r meta converters build/types/mla_fusion/
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p mla_fusion

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/pass_time.py

docs: $(VENV)/.ready
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate_operator.py

# The CPU build of torch first: resolved together with the rest, a CUDA build of several GB may be taken.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e '.[offline,hf,report,test]'
	touch $@

clean:
	rm -rf $(VENV) build out
