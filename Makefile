# `make quickstart`, `make test` and `make benchmark` do all their own set-up, from exact versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FUZZ_INPUTS ?= 100000
# The tests of a file share what its fixtures make; a worker that has none left takes some of another's.
WORKERS ?= --numprocesses 2 --dist worksteal
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed
FIRST_HALF := ^(torch|pyarrow|numpy)=
DEV_INSTALLED := $(VENV)/.installed-dev
# The competitors of `make benchmark` have an environment of their own.
BENCHMARK_VENV := .venv-benchmark
AUDIT_VENV := .venv-audit
BENCHMARK_INSTALLED := $(BENCHMARK_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all lint docs fuzz sbom audit benchmark clean

help:
	@echo "make quickstart   text, features and a mask of them, in quickstart-data/ and runs/"
	@echo "make test         linters, types and the tests of every commit, below ten minutes on two cores"
	@echo "make test-all     linters, types, documentation and every test, with coverage"
	@echo "make docs         the documentation as pages, in site/"
	@echo "make fuzz         100,000 damaged files and configs, in about half an hour; FUZZ_INPUTS=1000 for fewer"
	@echo "make sbom         what is installed, as CycloneDX, in sbom.json"
	@echo "make audit        known vulnerabilities of what is installed"
	@echo "make benchmark    f, seconds and memory beside competitors, twenty minutes on two cores;"
	@echo "                  DATA='shards/*.parquet' names the features, ARGS='--write docs' writes a page and a picture"
	@echo "make clean        removes what the above made"

install: $(DEV_INSTALLED)

$(BIN)/python:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'the locked versions need Python 3.11 or newer, this is ' + sys.version.split()[0])"
	$(PYTHON) -m venv $(VENV)

# The lock is complete, so pip need not resolve. Two halves install at once. Python compiles a module when it is first
# imported, which is a part of them: hence --no-compile, and a shell that forbids Python to write is overruled.
quickstart: export PYTHONDONTWRITEBYTECODE =
$(INSTALLED): requirements.lock pyproject.toml | $(BIN)/python
	@grep -E '$(FIRST_HALF)' requirements.lock > $(VENV)/first.txt
	@grep -vE '$(FIRST_HALF)' requirements.lock > $(VENV)/second.txt
	$(INSTALL) --no-compile --no-deps --requirement $(VENV)/first.txt & first=$$!; \
	$(INSTALL) --no-compile --no-deps --requirement $(VENV)/second.txt && wait $$first
	$(INSTALL) --no-compile --no-build-isolation --no-deps --editable .
	@touch $@

$(DEV_INSTALLED): requirements-dev.lock pyproject.toml | $(BIN)/python
	$(INSTALL) --requirement requirements-dev.lock
	$(INSTALL) --no-build-isolation --no-deps --editable .
	@touch $(INSTALLED) $@

quickstart: $(INSTALLED)
	$(BIN)/python cli.py sample --output quickstart-data/text.parquet
	$(BIN)/python cli.py embed --source quickstart-data/text.parquet --output quickstart-data/features.parquet
	$(BIN)/python cli.py fit --config configs/quickstart.yaml
	@echo
	@echo "texts   python cli.py apply --mask MASK --source quickstart-data/text.parquet --output kept"
	@echo "first   . $(BIN)/activate, so that python is the one that has just been set up"

lint: $(DEV_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest $(WORKERS) --durations=10

# pytest comes last, for its closing line counts the tests.
test-all: lint docs
	$(BIN)/pytest -m "" $(WORKERS) --hypothesis-profile=thorough --cov --cov-report=term:skip-covered --durations=20

docs: $(DEV_INSTALLED)
	PYTHONPATH=. $(BIN)/python docs/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

fuzz: $(DEV_INSTALLED)
	FUZZ_INPUTS=$(FUZZ_INPUTS) $(BIN)/pytest -m "" $(WORKERS) --hypothesis-profile=thorough tests/fuzz --durations=10

# Tools of their own packages, in an environment of their own.
$(AUDIT_VENV)/.installed:
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0 pip-audit==2.10.1
	@touch $@

sbom: $(AUDIT_VENV)/.installed
	$(AUDIT_VENV)/bin/cyclonedx-py requirements --output-reproducible --output-file sbom.json requirements.lock

audit: $(AUDIT_VENV)/.installed
	$(AUDIT_VENV)/bin/pip-audit --strict --disable-pip --no-deps --requirement requirements.lock

$(BENCHMARK_INSTALLED): benchmarks/requirements.lock
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'benchmarks/requirements.lock needs Python 3.11 or newer, this is ' + sys.version.split()[0])"
	$(PYTHON) -m venv $(BENCHMARK_VENV)
	$(BENCHMARK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/requirements.lock
	@# A competitor that has no build for this machine is reported in the table.
	-$(BENCHMARK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps submodlib-py==0.0.3
	@touch $@

benchmark: $(BENCHMARK_INSTALLED)
	PYTHONPATH=. $(BENCHMARK_VENV)/bin/python benchmarks/suite.py $(DATA) $(ARGS)

clean:
	rm -rf $(VENV) $(BENCHMARK_VENV) $(AUDIT_VENV) sbom.json quickstart-data runs site .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
