# Each target works alone on a fresh clone: it makes .venv and installs what it needs.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

.PHONY: demo test check faults clean

.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "brimful needs Python 3.11 or newer; hint: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo,compare,datasets,tensorboard,report]'
	@touch $@

demo: .venv/installed
	$(BIN)/brimful demo

test: .venv/installed
	$(BIN)/python -m pytest -n auto --dist worksteal

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

faults: .venv/installed
	$(BIN)/python -m pytest -m faults -s tests/engine/training/test_faults.py tests/engine/classification/test_classify_faults.py tests/data/writers/test_shards.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache demo-run
