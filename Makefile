# Everything runs in .venv, which is made here. Needs Python 3.11 or later with venv, no root.
#   make demo    the main job on real input   make test      a test or more of every promise
#   make bench   beside plain Postgres, once  make test-all  those, and what takes longer
#   make quick   each invariant, in 2 minutes
#   make lint    code, types and prose        make compare  the queue beside others, as in production, or
#                                              ARGS=--laboratory
#   make matrix  quick tests with each version of Python, PySpark and PostgreSQL
#   make docs    the pages that are generated from the code
#   make site    all pages as a site, with a search, in build/site
#   make release the wheel, the sdist, the bill of materials and their sums, in dist; see
#                tests/release.md
#   make bench-check  the server's CPU for each operation, beside what it was at the last kept commit;
#                     ARGS=--keep keeps it by commit, in tests/benchmarks/server_time.json
#   make explore every interleaving of each pair of calls: hours
#   make mutants plants single faults in the SQL and counts those that a test finds: hours, or
#                ARGS="--seed 7 --count 20"
#   make measure lines and calls of the SQL; how many functions a receive and an ack go through
#   make endure  kills of every kind beside messages through everything, counted: an hour, or
#                ARGS="--minutes 600"; what it counts is added to tests/endure/tally.json
.DELETE_ON_ERROR:
.PHONY: demo quick test test-all bench bench-check explore mutants measure endure compare matrix docs site release lint \
	clean

# The first of these that is 3.11 or later; or say which: make PYTHON=/path/to/python test
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# Compiled code is kept, also where a machine says otherwise: tests start Python hundreds of times.
export PYTHONDONTWRITEBYTECODE :=

demo: .venv/demo
	$(BIN)/python -m spark_pgqueue demo $(ARGS)

# All tests in three processes (pytest-xdist), each with servers of its own: two leave cores idle
# while tests wait. In one process: a part of them, so that --pdb and -s work; and on a given
# server, whose roles all databases share.
# RERUNS=1 runs a failed test again, and names it: for machines that run nothing but tests.
WORKERS ?= $(if $(ARGS)$(PGQUEUE_TEST_URL),0,3)
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS)$(if $(RERUNS), --reruns $(RERUNS) -raR)

test: .venv/dev
	$(PYTEST) $(ARGS)

# The tests named in a file, with the newest Postgres alone.
quick: .venv/dev
	PGQUEUE_TEST_VERSIONS=$${PGQUEUE_TEST_VERSIONS:-18} $(PYTEST) @tests/quick.txt $(ARGS)

# In one run: the longer tests begin, and the others fill the processes up to the end.
test-all: .venv/dev
	$(PYTEST) -m "" $(ARGS)

bench: .venv/dev
	$(BIN)/python -m tests.benchmarks $(ARGS)

bench-check: .venv/dev
	$(BIN)/python -m tests.benchmarks.server_time $(ARGS)

explore: .venv/dev
	$(BIN)/python -m tests.explore $(ARGS)

mutants: .venv/dev
	$(BIN)/python -m tests.mutants $(ARGS)

measure: .venv/dev
	$(BIN)/python -m tests.measure $(ARGS)

endure: .venv/dev
	$(BIN)/python -m tests.endure $(ARGS)

compare: .venv/compare
	$(BIN)/python -m tests.benchmarks.compare $(ARGS)

matrix: .venv/matrix
	$(BIN)/python -m tests.matrix $(ARGS)

docs: .venv/dev
	$(BIN)/python -m tests.docs

site: .venv/site
	$(BIN)/python -m tests.site $(ARGS)

release: .venv/release
	$(BIN)/python -m tests.release $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m tests.prose

clean:
	rm -rf .venv .matrix build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The checkout itself is installed (--editable): its changes take effect at once.
.venv/demo .venv/dev: .venv/%: pyproject.toml | .venv/bin/pip
	$(BIN)/pip install --quiet --editable ".[$*]"
	$(call need-java)
	touch $@

# What it compares with is left out where it cannot be had; the run says so.
.venv/compare: pyproject.toml | .venv/bin/pip
	$(BIN)/pip install --quiet --editable ".[compare]" || \
		$(BIN)/pip install --quiet --editable ".[embedded]" matplotlib
	touch $@

# It works without uv too, but takes longer and more of the disk.
.venv/matrix: pyproject.toml | .venv/bin/pip
	$(BIN)/pip install --quiet --editable ".[matrix]" || \
		$(BIN)/pip install --quiet --editable ".[embedded]"
	touch $@

.venv/site .venv/release: .venv/%: pyproject.toml | .venv/bin/pip
	$(BIN)/pip install --quiet --editable ".[$*]"
	touch $@

.venv/bin/pip:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later with venv is needed" \
		"(on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip

# The machine's Java when it will do; else PyPI's.
define need-java
@$(BIN)/python -m spark_pgqueue.spark.platform.java 2>/dev/null || \
	{ $(BIN)/pip install --quiet --editable ".[java]" && $(BIN)/python -m spark_pgqueue.spark.platform.java; }
endef
