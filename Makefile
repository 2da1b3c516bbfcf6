# Each target works alone on a fresh clone: it makes .venv and installs what it needs.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# Written, or each process that a test starts compiles everything again.
export PYTHONDONTWRITEBYTECODE =
# One more than cores: tests of several processes wait for one another.
WORKERS := $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )))

# What most mistakes break, in a minute and a half: one step, batches, packing, answers, one reader, one run of each command.
QUICK := test_words.py core data/batches data/labels data/readers/test_stream.py kernels/test_layout.py mutants reports \
	kernels/attention/test_dispatch.py models/packed/test_families.py::test_packed_is_plain step/test_step.py \
	step/test_exactness.py::test_packed_bert tasks/test_task.py tasks/test_answer_equivalence.py cli/test_help.py \
	cli/test_config_file.py cli/test_train_command.py::test_the_talk_in_a_pipe \
	cli/test_classify_command.py::test_lines_of_json_on_stdout_keep_columns_and_order

# Tests of what runs with packages that `make test` does without.
EXTRAS := levers/test_named_optimizers.py step/updates/test_on_device.py engine/training/test_deepspeed_training.py \
	cli/test_ray_launch.py integrations/trackers/test_packages.py

.PHONY: demo test thorough quick mutants heads check extras faults scripts browser clean

# The browser of `make browser`: a name on PATH, or a path.
CHROMIUM ?= $(shell for c in chromium chromium-browser google-chrome; do command -v $$c && break; done)

.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "brimful needs Python 3.11 or newer; hint: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo,compare,datasets,excel,tensorboard,report]'
	@touch $@

# An environment of its own; DeepSpeed compiles nothing.
.venv/extras/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "brimful needs Python 3.11 or newer; hint: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv/extras
	.venv/extras/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	DS_BUILD_OPS=0 .venv/extras/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,optimizers,deepspeed,ray,tensorboard,wandb,mlflow,trackio]'
	@touch $@

demo: .venv/installed
	$(BIN)/brimful demo

# Without pytest's rewriting of assertions, which each worker would make anew; what fails runs again with it.
test: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --assert=plain || \
	{ $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none; exit 1; }

# Every case of the suite, with those that take long: before an issue is closed.
thorough: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --assert=plain --thorough || \
	{ $(BIN)/python -m pytest -q --thorough --last-failed --last-failed-no-failures none; exit 1; }

quick: .venv/installed
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup $(addprefix tests/,$(QUICK))

# On a machine with a GPU: make mutants MUTANTS=--gpu
mutants: .venv/installed
	$(BIN)/python tests/mutants/run_mutants.py $(MUTANTS)

# A tiny model of every type that transformers has a classifier of; with WRITE=RESULTS.jsonl also docs/reference/models.md
heads: .venv/installed
	$(BIN)/python tests/heads/run_heads.py $(if $(WRITE),--write $(WRITE))

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Optimizers of bitsandbytes and torchao, DeepSpeed, Ray and trackers: after a change to one of them.
extras: .venv/extras/installed
	.venv/extras/bin/python -m pytest $(addprefix tests/,$(EXTRAS))

faults: .venv/installed
	$(BIN)/python -m pytest -m faults -s tests/engine/training/test_faults.py tests/engine/training/test_rank_faults.py tests/engine/training/test_resume.py tests/engine/classification/test_classify_faults.py tests/engine/classification/test_claim_faults.py tests/data/writers/test_shards.py

# Benchmark scripts as whole processes, small: after a change to one of them.
scripts: .venv/installed
	$(BIN)/python -m pytest -m scripts tests/benchmarks

# Pages in Chromium, on a phone, a desk and paper: before a change of a page is committed.
browser: .venv/installed
	@command -v "$(CHROMIUM)" >/dev/null || { echo "make browser needs Chromium, and $(if $(CHROMIUM),there is no $(CHROMIUM),none is on PATH); hint: apt install chromium, or make browser CHROMIUM=/path/to/chrome" >&2; exit 2; }
	CHROMIUM="$(CHROMIUM)" $(BIN)/python -m pytest -m browser tests/reports/test_in_a_browser.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache demo-run*
