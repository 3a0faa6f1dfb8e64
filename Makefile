# `make` prints what there is. PY=python3 uses that Python as it is and installs nothing.

CUDA ?= auto

ifdef PY
SETUP = @true
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY = .venv/bin/python
SETUP = @.ci/setup $(CUDA)
endif
STAGER = $(PY) -m stager.cli

.DEFAULT_GOAL := help
.PHONY: help setup demo test check fuzz lint smoke test-gpu bench clean

help:  ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "CUDA=auto|12|13|none   the CUDA libraries to install [auto: what the driver says]"
	@echo "PY=python3             use this Python and install nothing"

setup:  ## make .venv and install stager and its test tools
	$(SETUP) test

demo: setup  ## make bars up, pack them, and train on them
	@mkdir -p demo
	$(PY) examples/make_bars.py demo/bars.csv
	$(STAGER) pack demo/bars.csv -o demo/bars.pack --force
	$(PY) examples/train.py demo/bars.pack

test: setup  ## run the tests (those that need a GPU are skipped without one)
	$(PY) -m pytest -q -m "not wheel and not service and not cluster"

# A missing browser, S3 server or fsspec fails here, and is only told by `make test`.
check: export STAGER_REQUIRE_BROWSER = 1
check: export STAGER_REQUIRE_S3 = 1
check: export STAGER_REQUIRE_REMOTE = 1
check:  ## lint, types, layers, all tests, the wheel in an empty environment
	$(SETUP) dev
	$(MAKE) lint PY=$(PY)
	$(PY) -m pytest -q

fuzz: setup  ## the tests on examples drawn anew, another set at each call
	STAGER_EXAMPLES=fuzz $(PY) -m pytest -q -m "not wheel and not service and not cluster"

lint:  ## ruff, mypy and the import contracts
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

smoke: setup  ## the whole way on the GPU, every value compared
	$(STAGER) smoke

test-gpu: setup  ## the tests that need a GPU; fails without one
	$(PY) -m pytest -q tests/gpu --require-gpu

bench: setup  ## measure on this machine; results in benchmarks/results
	$(PY) benchmarks/stage.py
	$(PY) benchmarks/arena.py
	$(PY) benchmarks/samples.py
	$(PY) benchmarks/serve.py
	$(PY) benchmarks/serve.py --device cpu
	$(PY) benchmarks/service.py
	$(PY) benchmarks/plot.py
	$(PY) benchmarks/pack.py
	$(PY) benchmarks/tables.py

clean:  ## remove what the other targets made
	rm -rf .venv demo build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
