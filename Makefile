# Two commands to know: `make demo` and `make test`. Everything runs from .venv, which `make setup` makes once.
PYTHON ?= python3
BIN := .venv/bin
# Of `make soak`: the first storm; each night another.
SEED ?= 1000
OURS := swarmnode swarmsim swarmnode_methods benchmarks
STAMP := .venv/.swarmnode-ready
COMPILED := .venv/.swarmnode-compiled
LINT := .venv/.swarmnode-lint
# Two thirds of all the code that is installed; nearly none of it is imported here.
UNCOMPILED := /(tests|testing|pip|mypy|mypyc|setuptools|_inductor|networkx|pygments|opentelemetry)/|/(scipy/(stats|signal)|sympy/physics)/|/transformers/models/(?!llama|auto)|/moto/(?!core|s3|moto_server)
# One thread a process: two processes of two threads each run slower than two of one (shared spin barriers).
export OMP_NUM_THREADS := 1
# Compiled once, tests with their assertions, not by each process again.
export PYTHONDONTWRITEBYTECODE :=

PYTEST = $(BIN)/python -m pytest -q -p no:cacheprovider
.PHONY: help setup demo test nightly record people chaos check proto docs site wheel release lock bench soak clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    a local swarm of 6 node processes trains a language model, loses one, and exports it"
	@echo "make test    format, lint, types, floors, stale code, and the tests of each push"
	@echo "make nightly the tests that make test leaves out: research methods, benchmarks, more pages, more live tests; CI runs both"
	@echo "make people  a volunteer, an organiser and a researcher, each from nothing but the wheel"
	@echo "make chaos   one life of a swarm under seventeen kinds of real faults, some minutes (SEED=1000)"
	@echo "make check   only the quick part: format, lint, types, floors, stale code"
	@echo "make setup   install into .venv (the others do it when needed)"
	@echo "make proto   generate swarmnode/base/wire again from proto/"
	@echo "make wheel   dist/*.whl, what volunteers install; make lock: requirements.txt, every package by its hash"
	@echo "make release all that a static host serves, in dist/: index, site, wheel, source, SBOM, hashes, notes; KEY=... signs"
	@echo "make docs    write what is made from the code: tables in docs/, the Grafana board, cloud-init"
	@echo "make site    the pages as a site in build/site, strictly; make docs first"
	@echo "make bench   measure throughput of the swarm and of the transport"
	@echo "make soak    hours: a long run with kills, 50 lives under faults, an hour of storms in virtual time, a million damaged inputs (SEED=1000, PARTS='fuzz storm'); writes docs/measurements/soak.md"

setup: $(COMPILED)

# pip's noise is hidden, its errors are not: -qq keeps them, and a failed step leaves no stamp.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "swarmnode needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; say PYTHON=/path/to/python3.11")'
	@echo "Installing into .venv (once, 1 to 3 minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --no-input -c constraints.txt -e '.[dev]'
	@touch $@

# Compiling on all cores halves the time; packages hold templates that do not compile, hence `|| true`. Uncompiled, every
# process would start 2 s later where PYTHONDONTWRITEBYTECODE is set (measured).
$(COMPILED): $(STAMP)
	@$(BIN)/python -m compileall -qq -j 0 -x '$(UNCOMPILED)' .venv/lib $(OURS) || true
	@touch $@

# Separate, because only tests need it: a demo in a fresh clone should not wait for it. Its tests skip where it fails.
$(LINT): $(STAMP)
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --no-input -c constraints.txt -e '.[lint]' || true
	@touch $@

demo: setup
	@$(BIN)/swarmnode up --nodes 6 --stages 3 --for 180s --kill 60s --out runs/demo

# Parts side by side, balanced by tests/seconds.json (`make record` writes it anew); failures run once more, alone.
test: $(STAMP)
	@$(MAKE) -s -j 2 setup $(LINT)
	@$(BIN)/python -m compileall -qq -j 0 $(OURS)
	@$(BIN)/python -m tests.suite push

# What `make test` leaves out (CONTRIBUTING.md, "Tests").
nightly: setup $(LINT)
	@$(BIN)/python -m tests.suite nightly properties
	@$(MAKE) -s site

# On a quiet machine, after tests were added or moved.
record: setup $(LINT)
	@$(BIN)/python -m tests.suite push nightly properties --record

# Three people, from nothing but the wheel.
people: setup
	@SWARMNODE_NIGHTLY=1 $(PYTEST) -s tests/live/test_people.py

chaos: setup
	@$(BIN)/swarmnode bench chaos --seed $(SEED)

check: setup
	@$(BIN)/python -m pytest -q -p no:cacheprovider tests/tidy

proto: setup
	@$(BIN)/python proto/generate.py

docs: setup
	@$(BIN)/python deploy/address.py
	@$(BIN)/python docs/generate.py
	@$(BIN)/python deploy/grafana/board.py
	@$(BIN)/python deploy/cloud-init/generate.py

# Its builder is in an environment of its own: nothing else needs it.
site:
	@test -x build/zensical/bin/zensical || { $(PYTHON) -m venv build/zensical && build/zensical/bin/pip install -q --disable-pip-version-check zensical==0.0.73; }
	@$(PYTHON) deploy/site.py build/zensical/bin/zensical

# Needs pip alone: nothing is installed.
wheel:
	@PIP_CONSTRAINT=constraints.txt $(PYTHON) -m pip wheel -q --disable-pip-version-check --no-deps -w dist .
	@! grep -q 'Homepage = "https://example.org' pyproject.toml || echo "pyproject.toml: Homepage is a placeholder: links of the README lead nowhere"
	@sha256sum dist/*.whl

# In an environment of its own, as the site.
release: site
	@test -x build/release/bin/cyclonedx-py || { $(PYTHON) -m venv build/release && build/release/bin/pip install -q --disable-pip-version-check build==1.6.1 cyclonedx-bom==7.5.0; }
	@build/release/bin/python deploy/release.py $(KEY)

lock: setup
	@$(BIN)/python deploy/lock.py

bench: setup
	@$(BIN)/swarmnode bench swarm
	@$(BIN)/swarmnode bench transport

soak: setup
	@$(BIN)/python -m tests.soak $(SEED) $(PARTS)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
