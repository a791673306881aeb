# make quickstart | test | test-slow | coverage | check | docs | docs-assets | wasm | dist | sbom | clean
#
# PYTHON       the Python that .venv is made from (3.11 or newer)
# TORCH        what pip installs first; a CPU build of the same version satisfies it
# CONSTRAINTS  a pip constraints file, if any: constraints.txt has the versions that the tests passed with
PYTHON ?= python3
TORCH ?= torch==2.13.0
CONSTRAINTS ?=

PIP = .venv/bin/python -m pip --disable-pip-version-check install $(if $(CONSTRAINTS),-c "$(CONSTRAINTS)")

.PHONY: quickstart test test-slow coverage check docs docs-assets wasm dist sbom clean
.DELETE_ON_ERROR:

quickstart: .venv/.installed
	.venv/bin/heedful quickstart

test: .venv/.installed-dev
	scripts/test

test-slow: .venv/.installed-dev
	scripts/test --slow

coverage: .venv/.installed-dev
	scripts/test --coverage

check: .venv/.installed-dev
	scripts/check

# The site, in build/site: open build/site/index.html.
docs: .venv/.installed-docs
	.venv/bin/python scripts/docs_pages.py build/docs
	.venv/bin/python -m sphinx -q -W --keep-going -b html -c docs -d build/doctrees build/docs build/site

# Runs the commands of docs/tasks and writes their output into the pages.
docs-assets: .venv/.installed
	.venv/bin/python scripts/docs_assets.py

# Compiles heedful/page/forward.cpp to forward.wasm, which is part of the repository.
wasm: .venv/.installed
	$(PIP) -e '.[wasm]'
	.venv/bin/python scripts/wasm.py

# The wheel and the source distribution, checked and tried in empty environments of the Pythons that are named.
DIST_PYTHONS ?= $(PYTHON)
dist: .venv/.installed-dev
	$(PIP) "twine>=6.1"
	rm -rf dist
	.venv/bin/python -m build --no-isolation --outdir dist .
	.venv/bin/python -m twine check --strict dist/*
	.venv/bin/python scripts/try_dist.py dist --torch "$(TORCH)" $(DIST_PYTHONS)

# What Heedful runs with, as CycloneDX JSON.
sbom: .venv/.installed-dev
	@mkdir -p dist
	.venv/bin/python scripts/sbom.py > dist/heedful.cdx.json

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find heedful tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps are written last, so an interrupted step is done again.
.venv/.made:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Heedful needs Python 3.11 or newer, and "$(PYTHON)" is not: try make PYTHON=python3.11' >&2; exit 1; }
	"$(PYTHON)" -m venv .venv
	@touch $@

.venv/.torch: .venv/.made
	$(PIP) "$(TORCH)"
	@touch $@

.venv/.installed: pyproject.toml .venv/.torch
	$(PIP) -e .
	@touch $@

# seqeval comes as a source alone, whose set-up fetches a setuptools-scm that cannot be loaded: it is built with this one.
.venv/.installed-dev: pyproject.toml .venv/.torch
	$(PIP) setuptools wheel "setuptools-scm<10"
	$(PIP) --no-build-isolation "seqeval>=1.2.2"
	$(PIP) -e '.[dev]'
	@touch $@ .venv/.installed

.venv/.installed-docs: pyproject.toml .venv/.torch
	$(PIP) -e '.[docs]'
	@touch $@ .venv/.installed
