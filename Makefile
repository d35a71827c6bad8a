# `make quickstart` and `make test` do all their own set-up, in .venv, from requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-slow lint docs benchmark clean

help:
	@echo "make quickstart   text, features and a mask of them, in quickstart-data/ and runs/"
	@echo "make test         linters, types and all tests"
	@echo "make test-slow    runs that are killed, again and again"
	@echo "make docs         the documentation as pages, in site/"
	@echo "make benchmark    f and seconds beside greedy; DATA='shards/*.parquet' names the features"
	@echo "make clean        removes what the above made"

install: $(INSTALLED)

$(INSTALLED): requirements.lock pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'requirements.lock needs Python 3.11 or newer, this is ' + sys.version.split()[0])"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

quickstart: $(INSTALLED)
	$(BIN)/python cli.py sample --output quickstart-data/text.parquet
	$(BIN)/python cli.py embed --source quickstart-data/text.parquet --output quickstart-data/features.parquet
	$(BIN)/python cli.py fit --config configs/quickstart.yaml

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest --cov --cov-report=term:skip-covered --durations=10

test-slow: $(INSTALLED)
	$(BIN)/pytest -m slow --durations=10

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

benchmark: $(INSTALLED)
	$(BIN)/python benchmarks/greedy.py $(DATA)

clean:
	rm -rf $(VENV) quickstart-data runs site .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
