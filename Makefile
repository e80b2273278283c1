# make run    make .venv when it is missing or outdated, then the tiny GRPO run on this machine
# make test   the checks, slow ones included, on two workers (WORKERS=0: in one process); make test-fast leaves those out
# make lint   ruff (format too) and mypy
# make chaos  what is done to runs, and what becomes of them: the table of faults and the kills of real roles
# make bench  speed against limits measured in the same run
# ARGS goes to the command: make run ARGS="training.steps=5", make test ARGS="tests/buffer -x"

VENV := .venv
PY := $(VENV)/bin/python
ARGS ?=
WORKERS ?= 2

# tests/workers.py says what they share.
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist loadscope --durations=20

# The stamp carries a hash of what was installed: an edited lock installs again, a touched one does not.
hash = $(shell cat $(1) requirements/make_venv.sh pyproject.toml | sha256sum | cut -c1-16)
LOCK := requirements/cpu.txt
DEV := requirements/dev.txt
VENV_STAMP := $(VENV)/.made-$(call hash,$(LOCK))
DEV_STAMP := $(VENV)/.dev-$(call hash,$(LOCK) $(DEV))

.PHONY: run test test-fast lint chaos bench venv dev
.NOTPARALLEL:

run: venv
	@$(PY) launch.py cluster=local recipe=tiny_grpo $(ARGS)

test: dev
	@$(PYTEST) $(ARGS)

test-fast: dev
	@$(PYTEST) -m "not slow" $(ARGS)

lint: dev
	@$(PY) -m ruff check launch.py vime tests benchmarks
	@$(PY) -m ruff format --check launch.py vime tests benchmarks
	@$(PY) -m mypy

chaos: dev
	@$(PY) -m pytest -v tests/chaos tests/supervise/test_kill.py tests/buffer/test_kills.py \
		tests/test_main_job.py::test_a_killed_engine_comes_back_and_a_killed_supervisor_ends_all \
		tests/training/test_resume_run.py::test_a_run_whose_engine_was_killed_goes_on_with_the_same_samples $(ARGS)

bench: dev
	@$(PY) -m benchmarks $(ARGS)

venv: $(VENV_STAMP)

dev: $(DEV_STAMP)

$(VENV_STAMP):
	@requirements/make_venv.sh $(VENV) $(LOCK)
	@rm -f $(VENV)/.made-* && touch $@

$(DEV_STAMP): $(VENV_STAMP)
	@requirements/make_venv.sh $(VENV) $(DEV)
	@rm -f $(VENV)/.dev-* && touch $@
