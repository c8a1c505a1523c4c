# make venv | train | test | sweep | check | bench | clean
#
#   make train ARGS="model=gpt-tiny trainer.max_steps=20"
#   make test ARGS="tests/unit -k topology"
#   make test LANES=0              # one test after the other, as --pdb and -s need it
#   make PYTHON=python3.12 venv

PYTHON ?= python3
ARGS ?=
# How many processes test at once; many tests start ranks of their own and wait for them.
LANES ?= 2
PYTEST := -m pytest -n $(LANES) --dist worksteal
BIN := .venv/bin
STAMP := .venv/.installed

# One thread a process: ranks share the cores, and results do not depend on how many there are.
export OMP_NUM_THREADS ?= 1

.PHONY: venv train test sweep check bench clean system
.DELETE_ON_ERROR:

venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) else \
	  "Python 3.10 to 3.13 is needed, $(PYTHON) is %d.%d; name another: make PYTHON=python3.12 venv" % v)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $@
	@$(MAKE) --no-print-directory system

# What pip cannot install.
system:
	@command -v ip >/dev/null && command -v tc >/dev/null || echo "note: the multi-host tests need the commands 'ip' and \
	'tc' (Debian and Ubuntu: apt-get install iproute2); without them these tests are skipped"
	@test "$$(id -u)" = 0 || echo "note: the multi-host tests need root, for network namespaces; without it they are skipped"

train: venv
	$(BIN)/python examples/train.py $(ARGS)

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: check system
	$(BIN)/python $(PYTEST) $(ARGS)

# All combinations of what `test` samples.
sweep: venv system
	$(BIN)/python -m pytest -m sweep $(ARGS)

bench: venv
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
