# make serve    build, install and serve a small chat model on 127.0.0.1:8000
# make test     build, install and run every test
# make test-long   what `make test` leaves out: contexts of 131,072 tokens, further families
# make setup    only .venv: every tool runs as .venv/bin/python -m tools.NAME
# make wheel    only dist/*.whl
# make bench    the measurements that the README quotes, into build/bench (hours; resumable)
# make bench-quick   those that take minutes
# make bump TO=X.Y.Z    move the pin to another release and test what hangs on it
# make clean    remove .venv, build and dist (downloads and models stay in the cache)
#
# With UPSTREAM=X.Y.Z, wheel, install, serve, test and bench do the same for another release of
# upstream's, in build/X.Y.Z. TESTS="tests/series ..." chooses tests.

PYTHON ?= $(shell command -v python3.11 || echo python3)
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

MODEL ?= smollm2
PORT ?= 8000
KV ?= tdsf_k4v4
ARGS ?=
# What depends on the release: the wheel, and upstream's code at work. requirements/cu*.txt, which
# test_pins.py reads, are the pin's. A bump runs less, to be over in minutes: the rest is left to
# `make test`.
RELEASE_TESTS := $(filter-out %/test_pins.py,$(wildcard tests/wheel/test_*.py)) tests/backends tests/serving
BUMP_TESTS := tests/series/test_series.py tests/wheel tests/backends tests/serving/test_server.py

.PHONY: setup wheel install serve test test-long bench bench-quick bump clean

setup: .venv/.ready

.venv/.ready: requirements/cpu.txt requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed\n  found $(PYTHON) " + sys.version.split()[0] + "\n  next: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	@$(PIP) install --progress-bar on -r requirements/cpu.txt -r requirements/dev.txt || { \
	printf 'error: the pinned packages could not be installed\n  into .venv; messages of pip are above\n  next: check the network and the free space (3 GB), then run make setup again\n' >&2; \
	exit 1; }
	@touch $@

ifdef UPSTREAM

wheel install serve test bench bench-quick: setup
	$(PY) -m tools.series stage $(UPSTREAM)
	$(MAKE) -C build/$(UPSTREAM) UPSTREAM= TESTS='$(or $(TESTS),$(RELEASE_TESTS))' $@

else

wheel: setup
	./build_wheel.sh --target cpu

install: setup
	$(PY) -m tools.wheel install --target cpu

serve: install
	$(PY) -m tools.serve --model '$(MODEL)' --port '$(PORT)' --kv '$(KV)' -- $(ARGS)

test: install
	$(PY) -m pytest $(or $(TESTS),tests)

test-long: install
	@$(PIP) install --quiet -r requirements/ray.txt
	$(PY) -m pytest tests -m long

BENCH := build/bench

bench: install
	$(PY) -m tools.bench kernels --json $(BENCH)/kernels.json
	$(PY) -m tools.bench quality --json $(BENCH)/quality.json
	$(PY) -m tools.bench decode --json $(BENCH)/decode.json
	$(PY) -m tools.bench decode --weights --json $(BENCH)/weights.json
	$(PY) -m tools.bench headline --json $(BENCH)/headline.json --plot $(BENCH)/headline.svg --table $(BENCH)/headline.md

bench-quick: install
	$(PY) -m tools.bench kernels --json $(BENCH)/kernels.json
	$(PY) -m tools.bench headline --quick --json $(BENCH)/quick.json --plot $(BENCH)/quick.svg --table $(BENCH)/quick.md

endif

bump: setup
	@test -n '$(TO)' || { printf 'error: which release?\n  make bump\n  next: make bump TO=X.Y.Z\n' >&2; exit 1; }
	@mkdir -p build && date +%s > build/bump-started
	$(PY) -m tools.series bump $(TO) $(ARGS)
	$(MAKE) test TESTS='$(or $(TESTS),$(BUMP_TESTS))'
	@echo "vLLM $(TO) is the pin, built and tested in $$(($$(date +%s) - $$(cat build/bump-started))) s"

clean:
	rm -rf .venv build dist
