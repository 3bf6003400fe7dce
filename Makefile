# Each target sets up what it needs in .venv and is quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip compiles nothing: Python compiles the few of 21,000 files that it imports, which saves a minute.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

# Processes read the compiled files of those before them, whatever this variable says outside: importing torch and timm
# takes 5 s with them and 15 s without.
export PYTHONDONTWRITEBYTECODE :=

# One thread per worker: two test processes share two cores. Keep freed memory: activations are large and alike.
export MALLOC_TRIM_THRESHOLD_ ?= 4000000000
export MALLOC_MMAP_THRESHOLD_ ?= 1000000000

# The pages of the report are tested in a real browser.
BROWSER = command -v chromium || command -v chromium-browser || command -v google-chrome

.PHONY: help env browser demo test test-alone test-changed check bench docs evidence release-check
help:
	@echo "make demo   recast a CNN as attention, verify, look, train a ViT in two forms (3 minutes on 2 cores)"
	@echo "make test   all tests      make check  format, lint, types, fast tests"
	@echo "make test-changed  the fast tests that use what changed; with SINCE=main what a branch changed"
	@echo "make browser  Chromium for the tests of the pages, where it can be installed"
	@echo "make bench  benchmarks     make docs   the documentation as a site"
	@echo "make release-check  builds the packages; installs the wheel in an empty environment and runs README's first block;"
	@echo "                    with RELEASE=1 the repository's public address must be set"
	@echo "make evidence  the studies of docs/evidence.md (at most 10 hours each; they resume)"

$(VENV)/.core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("isomorph needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; run make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV) with torch, torchvision and timm (about 2 minutes, 6 GB, once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "Adding the test tools to $(VENV) (about a minute, once) ..."
	@$(PIP) -e '.[dev]'
	@touch $@

env: $(VENV)/.dev

demo: $(VENV)/.core
	@$(BIN)/isomorph demo

browser:
	@{ $(BROWSER); } >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing Chromium for the tests of the pages (once) ..."; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			chromium fonts-dejavu-core; } >/dev/null || echo "It could not be installed: tests of the pages will be skipped (where ISOMORPH_REQUIRE_ALL is set they fail)."; \
	else echo "No Chromium: tests of the pages will be skipped. On Debian: sudo apt-get install chromium"; fi

test: $(VENV)/.dev browser
	@echo "Running all tests in two processes ..."
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 10

# As on a machine without the folder of data sets; the network is hidden from all tests.
test-alone: $(VENV)/.dev
	@echo "Running the tests that read data sets, without them ..."
	@ISOMORPH_ALONE=1 ISOMORPH_REQUIRE_ALL= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m data

# SINCE=main takes what a branch changed; without it, what is not committed yet.
test-changed: $(VENV)/.dev
	@files=$$($(BIN)/python docs_build/changed_tests.py $(SINCE)) && if test -n "$$files"; then \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'not slow' $$files; else echo "No test uses what changed."; fi

check: $(VENV)/.dev browser
	@echo "Checking format, lint, types and, unless TESTS=none, the fast tests ..."
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@test "$(TESTS)" = none || OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

bench: $(VENV)/.dev
	@$(BIN)/python benchmarks/gpsa.py
	@$(BIN)/python benchmarks/convit.py
	@$(BIN)/python benchmarks/tdrl.py
	@$(BIN)/python benchmarks/refiner.py
	@$(BIN)/python benchmarks/coatnet.py

evidence: $(VENV)/.dev
	@for method in insert window tcnn convit tdrl refiner coatnet; do $(BIN)/python benchmarks/evidence.py $$method --hours 10 || exit; done

docs: $(VENV)/.core
	@$(PIP) -e '.[docs]'
	@$(BIN)/python docs_build/generate.py changelog command-line recipe suites api >/dev/null
	@$(BIN)/zensical build --strict --clean
	@$(BIN)/python docs_build/check_site.py site
	@echo "The site is in site/: open $(CURDIR)/site/index.html (no server and no network needed)"

# With RELEASE=1, as in the release workflow, the repository's public address must be set.
release-check: $(VENV)/.dev
	@! { test "$(RELEASE)" = 1 && grep -q 'repository\.invalid' pyproject.toml README.md docs/start/install.md; } || { \
		echo "Not ready to release: pyproject.toml, README.md or docs/start/install.md has repository.invalid; write the public address." >&2; exit 1; }
	@rm -rf dist
	@$(PIP) twine
	@$(BIN)/python -m build --outdir dist
	@$(BIN)/twine check --strict dist/*
	@$(BIN)/python -m pytest tests/test_package.py  # what is in the wheel, and no link of its description is relative
	@$(BIN)/python -m venv --clear dist/env
	@dist/env/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	@cd dist && env/bin/python ../docs_build/first_block.py ../README.md
	@rm -rf dist/env
