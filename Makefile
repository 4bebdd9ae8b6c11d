# `make demo` and `make test` work as the first command in a fresh clone: the only needs are
# Python >= 3.11 with pip, and a package index. Another interpreter: `make test PYTHON=python3.12`.

PYTHON ?= python3
BIN := .venv/bin
DEMO := ddp,diloco,streaming_diloco:tau=2,muloco,muloco:bits=2,sparseloco:density=1/32,sparse_muloco:density=1/32

.PHONY: help demo docs test test-all test-gpu claims soak check bench package clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1  /p' $(MAKEFILE_LIST)

demo: .venv/.demo  ## train one small model seven ways on this machine and report on loss and bytes
	$(BIN)/thinwire compare --methods $(DEMO) --workers 4 --steps 300 --seeds 0 \
	  --jobs 2 --out runs/demo
	$(BIN)/thinwire report runs/demo --out runs/demo/report.html

test: .venv/.ready  ## run the tests for every merge, at most five minutes
	$(BIN)/python -m pytest

test-all: .venv/.ready  ## run all tests, also real elastic processes, browser, network namespaces
	$(BIN)/python -m pytest -m ""

test-gpu: .venv/.ready  ## compare what a GPU computes with the CPU, bit for bit
	$(BIN)/python -m pytest -m gpu

claims: .venv/.ready  ## test the published claims, two hours and a half on two cores, against the committed table
	$(BIN)/python benchmarks/claims.py small runs/claims

soak: .venv/.ready  ## kill, stop and cut off elastic workers at random, for half an hour
	$(BIN)/python tools/soak.py --ranks 1,2

check: .venv/.ready  ## check format, lint, types, and import direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

bench: .venv/.ready  ## measure this machine: ratios against named baselines
	$(BIN)/python benchmarks/bench.py --out benchmarks/results

package: .venv/.ready  ## build sdist and wheel into dist/, and check both as an index would
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

docs: .venv/.ready  ## build the documentation site in site/, strictly
	$(BIN)/python tools/docs_site.py

clean:  ## remove the environment, run folders, caches and build leftovers
	rm -rf .venv runs build dist site .cache src/*.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp, so that an interrupted or outdated installation is completed before anything runs in it.
# Modules are compiled when they are first imported, and kept whatever the environment says: to compile
# all of them takes twice as long as to unpack them, and tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = $(BIN)/python -m pip install --no-compile -c constraints.txt

.venv/.ready: .venv/.demo
	$(INSTALL) -e '.[all,docs,dev]'
	@touch $@

# What the demo needs.
.venv/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "cannot set up .venv; because '$(PYTHON)' is not a Python >= 3.11;" \
	       "do: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[train,fast,report]'
	@touch $@
