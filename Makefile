# Every target sets itself up: a virtual environment in .venv, plain pip, nothing else on the machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export XDG_CACHE_HOME := $(CURDIR)/.cache

.PHONY: demo test test-slow test-pods test-accelerator test-nightly compilers protoc learn pictures lint docs notebooks dist bench clean
.DEFAULT_GOAL := demo

$(VENV)/.core: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "podracer needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/pip install --quiet --editable '.[test]'
	@touch $@

demo: $(VENV)/.core  ## train PPO on Catch, with a curve and an animation
	rm -rf runs/demo
	$(BIN)/podracer train ppo catch --total-steps 200000 --run-dir runs/demo --gif runs/demo/policy.gif
	@echo "see runs/demo/curve.png and runs/demo/policy.gif"

test: $(VENV)/.test $(VENV)/.protoc  ## identities, oracles, probes, conformance, command line
	$(BIN)/pytest -n auto --dist worksteal

test-slow: $(VENV)/.test  ## device-count equality, resume, signals, long conformance
	$(BIN)/pytest -m "slow and not nightly" -n 3 --dist loadfile --no-loadscope-reorder

test-pods: $(VENV)/.test  ## those of the slow tests that run in several processes
	$(BIN)/pytest -m "slow and not nightly" tests/pod

test-nightly: compilers  ## slow tests that are not in test-slow: further cases, compilation for a TPU and a GPU
	$(BIN)/pytest -m nightly -n 3 --dist loadfile --no-loadscope-reorder

compilers: $(VENV)/.compiler-v5e $(VENV)/.compiler-h200  ## what compiles for TPU v5e and for an H200 on any machine; about 1 GB

$(VENV)/.compiler-%: $(VENV)/.test
	@$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/compilers \
	    $$($(BIN)/python -m tests.support.compilers requirements $*) && touch $@ || \
	    echo "the compiler for $* could not be installed: its tests are skipped"

protoc: $(VENV)/.protoc  ## what generates podracer/remote/session_pb2.py

$(VENV)/.protoc: $(VENV)/.test
	@$(BIN)/pip install --quiet --retries 1 --no-deps --upgrade --only-binary :all: --target $(VENV)/protoc \
	    grpcio-tools==1.62.3 && \
	    touch $@ || echo "grpcio-tools 1.62.3 could not be installed: the generated code of the protocol is not compared"

test-accelerator: $(VENV)/.test  ## what needs a GPU or a TPU: one process, whatever JAX finds, exact products
	JAX_PLATFORMS= JAX_DEFAULT_MATMUL_PRECISION=highest $(BIN)/pytest -m accelerator

learn: $(VENV)/.test  ## controls, which must not learn, and curves of all agents; rewrites benchmarks/results/learning
	$(BIN)/pytest -m learns -n 2
	$(BIN)/python benchmarks/learn.py

pictures: $(VENV)/.core  ## the animation of README, and the search that the guides show, in docs/images
	$(BIN)/pip install --quiet --editable '.[sebulba]'
	$(BIN)/python docs/pictures.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(VENV)/.core  ## the documentation site, in site/
	$(BIN)/pip install --quiet --editable '.[docs,sebulba,gym,games]'
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f docs/generated/mkdocs.yml

notebooks: $(VENV)/.test  ## run examples/notebooks and keep what they show; about ten minutes
	$(BIN)/python docs/notebooks.py

dist: $(VENV)/.core  ## sdist and wheel in dist/, checked
	$(BIN)/pip install --quiet --editable '.[release]'
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

bench: $(VENV)/.test  ## speed next to plain loops; rewrites benchmarks/results/{anakin,sebulba,replay,dqn,reanalyse}.json
	JAX_NUM_CPU_DEVICES=2 $(BIN)/podracer bench anakin --devices 1 2 --json benchmarks/results/anakin.json
	$(BIN)/podracer bench sebulba --json benchmarks/results/sebulba.json
	$(BIN)/podracer bench replay --json benchmarks/results/replay.json
	$(BIN)/python benchmarks/dqn.py --json benchmarks/results/dqn.json
	$(BIN)/python benchmarks/reanalyse.py --json benchmarks/results/reanalyse.json
	$(BIN)/python benchmarks/readme.py

clean:
	rm -rf $(VENV) .cache runs build dist site docs/generated *.egg-info
