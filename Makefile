# Two commands do all set-up: `make demo` and `make test`. Neither needs an NPU, or CANN.
#
#   make demo    everything end to end, written to out/
#   make test    lint, types and the tests
#   make test-all    the exhaustive tests too, other processors and the matrix, in about an hour; before a release
#   make test-portable    tests of numbers as other processors compute them (portable-0 to portable-3: each alone)
#   make matrix  the matrix of torch and torch_npu (PAIR=2.10.0 for one; noxfile.py says more)
#   make bench   pass times beside Inductor's matcher
#   make docs    the pages that are generated from the code
#   make package     wheel and source archive, each installed and tried in an empty environment
#   make pictures    the picture of README
#   make site    the documentation as a site, in build/site
#
# PYTHON is the interpreter (3.10 or newer, with venv) that the first call makes .venv from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# torch_npu is installed beside a torch without CANN; left to itself, `import torch` would try to load it.
export TORCH_DEVICE_BACKEND_AUTOLOAD = 0
# What is imported is compiled once, not in each of the processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test suite exhaustive test-all test-portable lint types matrix bench docs pictures package site clean

demo: $(READY)
	$(BIN)/mla-fusion demo --out out

# Two processes: torch is kept to one thread each, and most tests compile graphs in Python. A process that dies fails
# the test that it ran.
PYTEST := $(BIN)/pytest -q -n 2 --dist worksteal
test: lint
	$(MAKE) --no-print-directory -j2 types suite

# Without the matrix, which has environments of its own.
suite: $(READY)
	$(PYTEST) --ignore tests/matrix

# A share of the exhaustive tests: SHARE=3/16.
exhaustive: $(READY)
	$(PYTEST) -m exhaustive --share $(SHARE)

test-all: lint types test-portable matrix
	$(PYTEST) -m ''

# The order in which a product's terms are added depends on the processor. These settings choose the code that a
# processor without AVX2, and one without AVX-512, would run, in torch and in MKL; the last two draw orders
# (tests/other_processor.py).
PORTABLE := $(PYTEST) -m 'portable and not exhaustive' tests/cli tests/fusion tests/weights tests/models

test-portable: portable-0 portable-1 portable-2 portable-3
portable-0: export ATEN_CPU_CAPABILITY = default
portable-0: export MKL_ENABLE_INSTRUCTIONS = SSE4_2
portable-1: export ATEN_CPU_CAPABILITY = avx2
portable-1: export ONEDNN_MAX_CPU_ISA = AVX2
portable-1: export MKL_ENABLE_INSTRUCTIONS = AVX2
portable-2: export OTHER_PROCESSOR = 1
portable-3: export OTHER_PROCESSOR = 2
portable-%: $(READY)
	$(PORTABLE)

lint: $(READY)
	$(BIN)/ruff check .

# mypy sees the packages where an installation puts them: meta/ and converters/ under mla_fusion/. They are links,
# so that errors name files which can be opened and the cache stays warm.
types: $(READY)
	rm -rf build/types && mkdir -p build/types/mla_fusion
	cd build/types/mla_fusion && ln -s ../../../mla_fusion/* ../../../meta ../../../converters .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p mla_fusion

# Downloads about 1 GB a pair, the first time. The results of pairs that are not run stay as they are.
matrix: $(READY)
	$(BIN)/pip install --quiet -e '.[matrix]'
	rm -rf build/matrix
	MATRIX_PYTHON=$(WITH) $(BIN)/nox -s matrix $(if $(PAIR),-t $(PAIR)) -- $(if $(QUICK),--quick); \
	  ran=$$?; $(BIN)/python -m tests.matrix.outcome && exit $$ran

bench: $(READY)
	$(BIN)/python benchmarks/pass_time.py --json benchmarks/out/pass_time.json

docs: $(READY)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate_operator.py
	$(BIN)/python docs/generate_hf.py
	$(BIN)/python docs/generate_releases.py
	$(BIN)/python docs/generate_support.py
	$(BIN)/python docs/generate_serving.py
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_worth.py
	$(BIN)/python docs/generate_notebook.py
	$(BIN)/python docs/generate_api.py

pictures: $(READY)
	$(BIN)/python docs/pictures.py

site: docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pair first: no extra names one, and resolved together with the rest a CUDA build of several GB may be taken. An
# interrupted installation leaves no stamp, so the next call goes on with it.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet torch_npu==2.13.0
	$(BIN)/pip install --quiet -e '.[offline,hf,test]'
	touch $@

# Each in an environment that holds nothing but pip: what the metadata asks for is what gets installed.
package: $(READY)
	rm -rf build/package && mkdir -p build/package
	$(BIN)/python -c "from setuptools import build_meta as b; b.build_wheel('build/package'); b.build_sdist('build/package')"
	for file in build/package/*.whl build/package/*.tar.gz; do \
	  rm -rf build/package/env && $(PYTHON) -m venv build/package/env && build/package/env/bin/pip install --quiet torch==2.13.0 && \
	  build/package/env/bin/pip install --quiet $$file && \
	  (cd build/package && env/bin/python -m mla_fusion.examples.fuse_your_model && env/bin/mla-fusion --version) || exit 1; done

clean:
	rm -rf $(VENV) .nox build out benchmarks/out
