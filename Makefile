# Everything here runs in .venv/, made on first use with any Python >= 3.11; see `make help`.

VENV   ?= .venv
EXTRAS ?= dev
LOCKED ?= constraints.txt
ARGS   ?=
JOBS   ?= 3

# The first interpreter that is new enough; `make PYTHON=/path/to/python` overrides the search.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	"$$p" -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && { echo "$$p"; exit; }; done)

# Python 3.13 or 3.12, which newer versions of JAX ask for: on the PATH, or among the versions of a pyenv.
PYENVS := $(PYENV_ROOT) $(HOME)/.pyenv /root/.pyenv /opt/pyenv
NEWEST ?= $(shell for p in python3.13 python3.12 $(PYENVS:%=%/versions/3.13.*/bin/python) \
	$(PYENVS:%=%/versions/3.12.*/bin/python); do "$$p" -c 'import sys, ensurepip; \
	sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' >/dev/null 2>&1 && { echo "$$p"; exit; }; done)

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed-$(EXTRAS)

.PHONY: help train plan test newest cartpole lint docs check bench bench-peers performance fuzz covered mutants lock clean
.DEFAULT_GOAL := help

help:
	@echo 'make train   train PPO on CartPole-v1; flags: make train ARGS="--env Pendulum-v1 --num-seeds 10"'
	@echo 'make plan    print the dataflow graph and the plan for the same flags, and run nothing'
	@echo 'make test    run the tests, JOBS=3 at a time; some, one at a time: make test ARGS="-k checkpoint -x"'
	@echo 'make newest  the tests of the engine on Python 3.13 or 3.12, with the newest JAX that is supported'
	@echo 'make lint    formatting, lint, types, who imports whom, no distribution code in algos/ or envs/, the site'
	@echo 'make docs    the documentation site, into build/site; while one writes: make docs ARGS=serve'
	@echo 'make check   lint, then the tests: what CI runs'
	@echo 'make bench   run the benchmarks; every size: make bench ARGS="--thorough"'
	@echo 'make bench-peers  speed beside other trainers, each in an environment of its own under build/'
	@echo 'make performance  docs/performance.md from the figures that these two kept'
	@echo 'make fuzz    random programs against plain JAX: make fuzz ARGS="--programs 1500 --jobs 2"; "--seed 7" replays'
	@echo 'make covered note which tests run which line, for make mutants'
	@echo 'make mutants how many small faults the tests notice: make mutants ARGS="--sample 300 --seed 0"'
	@echo 'make lock    resolve constraints.txt and constraints-newest.txt anew from the ranges in pyproject.toml'
	@echo 'make clean   remove the environment and the caches; runs/ is kept'
	@echo 'Variables:   PYTHON (any Python >= 3.11), EXTRAS (dev; "dev,cuda" for an NVIDIA GPU, "dev,tpu")'

$(STAMP): pyproject.toml $(LOCKED)
	@test -n "$(PYTHON)" || { echo 'error: no Python >= 3.11 found; name one: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@"$(PYTHON)" -c '$(NEW_ENOUGH)' || { echo 'error: fdg needs Python >= 3.11, and $(PYTHON) is' \
		"$$("$(PYTHON)" -V 2>&1); name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x "$(BIN)/pip" || "$(PYTHON)" -m venv --clear "$(VENV)"
	"$(BIN)/pip" install --quiet --disable-pip-version-check -c $(LOCKED) -e '.[$(EXTRAS)]'
	@touch "$@"

train: $(STAMP)
	"$(BIN)/python" -m fdg.train $(ARGS)

plan: $(STAMP)
	"$(BIN)/python" -m fdg.plan $(ARGS)

# Programs that tests start find our modules compiled, also where the environment says that none are kept.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
	"$(BIN)/python" -m pytest $(or $(ARGS),--numprocesses $(JOBS) --dist loadscope --no-loadscope-reorder)

# Algorithms and environments say nothing about devices: that is the engine's part alone.
DISTRIBUTION := pmean|psum|all_gather|ppermute|shard_map|device_put|PartitionSpec|NamedSharding|Mesh

# The parts that JAX's versions could break, on the newest one for which all that we need is released.
PARTS := tracing batch placing lowering running profiling

newest:
ifeq ($(NEWEST),)
	@echo 'not run: no Python 3.12 or 3.13'
else
	$(MAKE) test cartpole PYTHON="$(NEWEST)" VENV="$(VENV)-newest" EXTRAS=test LOCKED=constraints-newest.txt \
		ARGS="$(or $(ARGS),--numprocesses $(JOBS) --dist loadscope $(PARTS:%=tests/%))"
endif

# CartPole-v1 counts as solved from a mean return of 475 on.
cartpole: $(STAMP)
	"$(BIN)/python" -m fdg.train --env CartPole-v1 --out "$(VENV)/cartpole"
	@"$(BIN)/python" -c 'import json, sys; found = json.load(open(sys.argv[1]))["eval_return"]; \
		sys.exit(f"error: CartPole-v1 returns {found}, and 475 is asked for" if found < 475 else None)' \
		"$(VENV)/cartpole/summary.json"
	@rm -rf "$(VENV)/cartpole"

lint: $(STAMP)
	"$(BIN)/ruff" format --check .
	"$(BIN)/ruff" check .
	"$(BIN)/mypy"
	PYTHONPATH=. "$(BIN)/lint-imports" --no-logo --no-cache
	@! grep -rnwE '$(DISTRIBUTION)' --include='*.py' algos envs \
		|| { echo 'error: distribution code in algos/ or envs/ (lines above): let a policy place the fragment' >&2; exit 1; }
	@mkdir -p build  # and not with --quiet, which lets warnings pass
	@"$(BIN)/mkdocs" build --strict > build/site.log 2>&1 || { cat build/site.log; exit 1; }

# Material for MkDocs says at every start that it will be followed by another program: docs/decisions/046.
export NO_MKDOCS_2_WARNING := 1

docs: $(STAMP)
	"$(BIN)/mkdocs" $(or $(ARGS),build --strict)

check: lint test

bench: $(STAMP)
	"$(BIN)/python" -m pytest bench --benchmark-only $(ARGS)

bench-peers: $(STAMP)
	"$(BIN)/python" -m bench.peers $(ARGS)
	"$(BIN)/python" -m bench.performance

performance: $(STAMP)
	"$(BIN)/python" -m bench.performance

fuzz: $(STAMP)
	"$(BIN)/python" -m tests.oracle.fuzz $(ARGS)

covered: $(STAMP)
	"$(BIN)/python" -m tools.covered $(ARGS)

mutants: $(STAMP)
	"$(BIN)/python" -m tools.mutants $(ARGS)

lock:
	"$(PYTHON)" .ci/lock.py > constraints.new && mv constraints.new constraints.txt
	"$(NEWEST)" .ci/lock.py --only test > constraints.new && mv constraints.new constraints-newest.txt

clean:
	rm -rf "$(VENV)" "$(VENV)-newest" build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
