# Two commands set up a fresh machine: `make demo` runs the main job, `make test` everything that CI checks.
PYTHON ?= python3
BIN := .venv/bin
# Two stamps: what the demo imports is installed in less than half of the time that everything takes.
INSTALLED := .venv/.installed
INSTALLED_FOR_DEMO := .venv/.installed-for-demo
# Tests wait for processes as often as they compute: three files of them left two cores idle for a fifth of the time. Each takes 3 GB.
WORKERS ?= 4
# tests/conftest.py has the order of files: the longest first.
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests of the rooms that need neither a simulator nor an engine.
UNIT := tests/util tests/types tests/graph tests/algorithms tests/pipelines/nodes tests/datasets

# The processes of one run share the cores; threads that spin at barriers cost more than they bring.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
# pip compiles nothing to bytecode; Python does at the first import, and each process would do it again where this is set.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick unit check style types suite docs lock bench proofs test-clients test-ray faults install clean

demo: $(INSTALLED_FOR_DEMO) ## collect episodes in LIBERO, reward them by SRPO, update a policy; ARGS="--run.updates 20" adds options
	$(BIN)/python -m vla_rl.recipes.srpo_libero $(ARGS)

test: style ## style, strict types, and every test that needs no GPU; mypy runs beside the tests
	$(MAKE) --no-print-directory --jobs 2 types suite

quick: style ## the same without the slow tests
	$(MAKE) --no-print-directory --jobs 2 types suite MARKS="not gpu and not proof and not slow"

MARKS ?= not gpu and not proof
suite: install
	$(BIN)/python -m pytest $(PARALLEL) -m "$(MARKS)" $(ARGS)

unit: install ## the pure rooms alone: no simulator, no engine, under 40 seconds
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not gpu and not proof and not slow" $(UNIT) $(ARGS)

proofs: install ## the long versions: learning, whole chains of recipes, killed hosts and engines, every way in which vLLM takes weights
	$(BIN)/python -m pytest -m "proof and not gpu" $(ARGS)

check: style types

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_prose.py

types: install
	$(BIN)/mypy

docs: install ## the pages and a reference of the API as a site in build/site; warnings are errors
	$(BIN)/pip install --quiet --editable ".[docs]" --constraint constraints.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lock: install ## constraints.txt anew, with the newest versions that pyproject.toml allows
	$(BIN)/python scripts/lock.py

bench: install ## every benchmark, with the peers that they compare with in an environment of their own
	$(BIN)/python scripts/bench.py $(ARGS)

test-clients: install ## openai, its Agents SDK, LangChain, anthropic and verifiers against a live endpoint, openpi-client against a served policy, each at its newest; ARGS="langchain"
	$(BIN)/python scripts/test_clients.py $(ARGS)

test-ray: install ## hosts on a Ray cluster of two nodes, with Ray in an environment of its own; ARGS="-k two_nodes"
	$(BIN)/python scripts/test_ray.py $(ARGS)

faults: install ## random kills, stops, full disks, damaged files, fuzzed sockets; ARGS="--minutes 30 --seed 7"
	$(BIN)/python -m benchmarks.faults $(ARGS)

install: $(INSTALLED)

$(INSTALLED_FOR_DEMO): pyproject.toml constraints.txt scripts/install.sh vla_rl/requirements/libero.txt vla_rl/requirements/libero-assets.txt
	PYTHON="$(PYTHON)" sh scripts/install.sh demo
	touch $@

$(INSTALLED): pyproject.toml constraints.txt scripts/install.sh $(wildcard vla_rl/requirements/*.txt)
	PYTHON="$(PYTHON)" sh scripts/install.sh
	touch $(INSTALLED_FOR_DEMO) $@

clean:
	rm -rf .venv *.egg-info .mypy_cache .pytest_cache .ruff_cache
