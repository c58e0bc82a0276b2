# Everything a newcomer needs, with only Python >= 3.11, pip and make. GNU make 3.81 (macOS) is enough.

PYTHON ?= python3
# Processes that share the tests; what is timed has the machine to itself in the end. See tests/conftest.py.
WORKERS ?= 2
BIN    := .venv/bin
DAEMON := .venv/.installed-daemon
DEV    := .venv/.installed-dev
SAY    := printf '%s\n' >&2
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check

# The question reaches the shell as an environment variable: whatever is in it, neither make nor sh looks into it.
override Q := $(value Q)
export Q

# Only from the command line: some systems have a variable of this name in every environment.
ifneq ($(origin NAME),command line)
NAME := decode
endif

.PHONY: help ask test test-all lint bench model stop

help:
	@echo 'make ask Q="..."    ask the default model; installs, fetches and starts what is missing'
	@echo 'make stop           stop the daemon that make ask started'
	@echo 'make test           run the tests'
	@echo 'make test-all       run the slow ones too'
	@echo 'make lint           ruff and mypy'
	@echo 'make bench NAME=... run benchmarks beside mlx-lm; tests/bench/RESULTS.md lists them'
	@echo 'make model          fetch the default model'

ask: $(DAEMON)
	@test -n "$$Q" || { $(SAY) 'what is the question? make ask Q="What is the capital of France?"'; exit 2; }
	@$(BIN)/mlxbc status >/dev/null 2>&1 || { \
	  $(SAY) 'starting the daemon (make stop ends it); if its model is not here: fetching that first, 90 MB ...'; \
	  $(BIN)/mlxbc pull --quiet smollm2 >/dev/null && $(BIN)/mlxbc serve --detach --wait >/dev/null; }
	@printf '%s' "$$Q" | $(BIN)/mlxbc ask

stop: $(DAEMON)
	@$(BIN)/mlxbc stop

model: $(DAEMON)
	@$(BIN)/mlxbc pull smollm2

test: $(DEV)
	@$(BIN)/mlxbc pull --quiet smollm2 >/dev/null || $(SAY) 'without the default model the tests that need it are skipped'
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not slow'

test-all: $(DEV)
	@$(BIN)/mlxbc pull --quiet smollm2 >/dev/null || $(SAY) 'without the default model the tests that need it are skipped'
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(DEV)
	@failed=0; set -x; \
	$(BIN)/ruff check || failed=1; $(BIN)/ruff format --check || failed=1; $(BIN)/mypy || failed=1; \
	exit $$failed

bench: $(DAEMON)
	@$(BIN)/mlxbc pull --quiet smollm2 >/dev/null
	$(BIN)/python tests/bench/run.py $(NAME)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "mlxbc needs Python 3.11 or newer, and \
	$(PYTHON) is %d.%d; with another one: make PYTHON=python3.12 ..." % v[:2])'
	@$(SAY) 'making .venv ...'
	@$(PYTHON) -m venv --clear .venv || { rm -rf .venv; exit 1; }

$(DAEMON): pyproject.toml $(BIN)/python
	@$(SAY) 'installing mlxbc with its daemon into .venv: about 400 MB, once ...'
	@$(PIP) --editable '.[daemon]'
	@touch $@

$(DEV): pyproject.toml $(BIN)/python
	@$(SAY) 'installing mlxbc with its daemon and the tools for tests into .venv: once ...'
	@$(PIP) --editable '.[daemon,dev]'
	@touch $@ $(DAEMON)
