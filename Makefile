# `make help` lists the targets. `make serve` and `make test` do their own set-up on a machine that
# has Python 3.11 or newer and nothing else.
VENV  ?= .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.ready
ROOMS := core kernels model engine kvstore prefill decode vision router cluster configs
CONFIG ?= configs/cluster/local.yaml
ARGS  ?=

# One thread a process: several engines share the cores, and two OpenMP pools on the same core
# were measured 4 to 27 times slower.
export OMP_NUM_THREADS ?= 1
# uv installs without bytecode: where Python may not write it, every process compiles torch anew
# (3.4 s of processor time for the rooms' imports, 1.6 s with bytecode).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve test test-fast lint types bench wheel clean

help:           ## this list
	@sed -n 's/^\([a-z-]*\):.*## */\1|/p' Makefile | while IFS='|' read -r name text; do \
	    printf '  make %-10s %s\n' "$$name" "$$text"; done

serve: $(STAMP) ## set up, start a cluster in the foreground, print its URL (CONFIG=...; Ctrl-C ends it)
	$(BIN)/headrace up --foreground $(CONFIG)

test: $(STAMP)  ## set up, run the whole test suite (ARGS="-k ring -x" narrows it)
	$(BIN)/pytest -n 2 --dist loadgroup $(ARGS)

test-fast: $(STAMP) ## the tests that start no Ray and kill nothing
	$(BIN)/pytest -m "not gpu and not slow and not ray and not fault" $(ARGS)

lint: $(STAMP) build/ns ## ruff, mypy and the import arrows
	$(BIN)/ruff check .
	PYTHONPATH=build/ns $(BIN)/lint-imports --cache-dir build/import_linter_cache
	@$(MAKE) --no-print-directory types

types: $(STAMP) build/ns ## mypy alone (strict on core, kvstore, router)
	MYPYPATH=build/ns $(BIN)/mypy $(ROOMS:%=-p headrace.%)

bench: $(STAMP) ## end-to-end measurements; results belong into docs/LOG.md (ARGS=...)
	$(BIN)/python bench/end_to_end/run.py $(ARGS)

wheel: $(STAMP) ## build dist/headrace-*.whl; its version carries the commit
	rm -rf build/lib build/bdist.* dist
	@mkdir -p build
	printf '[egg_info]\ntag_build = +g%s\n' \
	    "$$(git describe --always --abbrev=12 --exclude '*' --dirty=.dirty)" > build/version.cfg
	DIST_EXTRA_CONFIG=$(CURDIR)/build/version.cfg $(BIN)/python -m pip wheel --quiet --no-deps \
	    --no-build-isolation --wheel-dir dist .

clean:          ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml .ci/environment
	@.ci/environment $(VENV)
	@touch $@

# Static tools do not run setuptools' import hook; they see the rooms through these links.
build/ns: Makefile
	@mkdir -p build/ns/headrace
	@for room in $(ROOMS); do ln -sfn ../../../$$room build/ns/headrace/$$room; done
	@touch $@
