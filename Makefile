# `make help` lists the targets. They run in .venv/, which is created on first use with any Python >= 3.11.

VENV   ?= .venv
EXTRAS ?= dev
LOCKED ?= constraints.txt
ARGS   ?=
JOBS   ?= 3

# The first interpreter that is at least Python 3.11; `make PYTHON=/path/to/python` overrides the search.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	"$$python" -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && { echo "$$python"; exit; }; done)

# The interpreter of `make newest`: Python 3.13 or 3.12, which newer versions of JAX need, from the PATH or pyenv.
PYENVS := $(PYENV_ROOT) $(HOME)/.pyenv /root/.pyenv /opt/pyenv
NEWEST ?= $(shell for python in python3.13 python3.12 $(PYENVS:%=%/versions/3.13.*/bin/python) \
	$(PYENVS:%=%/versions/3.12.*/bin/python); do "$$python" -c 'import sys, ensurepip; \
	sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' >/dev/null 2>&1 && { echo "$$python"; exit; }; done)

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed-$(EXTRAS)

.PHONY: help train plan test newest cartpole lint docs check bench bench-peers performance fuzz covered mutants lock clean
.DEFAULT_GOAL := help

help:
	@echo 'make train   train PPO on CartPole-v1; flags: make train ARGS="--env Pendulum-v1 --num-seeds 10"'
	@echo 'make plan    print the dataflow graph and the plan for the same flags, and run nothing'
	@echo 'make test    run the tests, JOBS=3 at a time; some, one at a time: make test ARGS="-k checkpoint -x"'
	@echo 'make newest  run the tests of the engine on Python 3.13 or 3.12, with the newest supported JAX'
	@echo 'make lint    check formatting, lint, types, import rules, no distribution code in algos/ or envs/, the site'
	@echo 'make docs    build the documentation site in build/site; to view it while you write: make docs ARGS=serve'
	@echo 'make check   run lint, then the tests; CI runs make newest, too'
	@echo 'make bench   run the benchmarks at a few sizes; every size: make bench ARGS="--thorough"'
	@echo 'make bench-peers  compare the speed with other trainers, each in its own environment under build/'
	@echo 'make performance  write docs/performance.md from the recorded figures of bench and bench-peers'
	@echo 'make fuzz    compare random programs with plain JAX: make fuzz ARGS="--programs 1500 --jobs 2"; replay: "--seed 7"'
	@echo 'make covered record which tests run each line, for make mutants'
	@echo 'make mutants measure how many small faults the tests detect: make mutants ARGS="--sample 300 --seed 0"'
	@echo 'make lock    resolve the version ranges in pyproject.toml; write constraints.txt and constraints-newest.txt'
	@echo 'make clean   remove the environments, build/, dist/ and the caches; keep runs/'
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

# Lets Python write compiled modules even if the user disabled that: tests start many processes that import them.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
	"$(BIN)/python" -m pytest $(or $(ARGS),--numprocesses $(JOBS) --dist loadscope --no-loadscope-reorder)

# Names that algos/ and envs/ must not contain: only the engine says which device does what.
DISTRIBUTION := pmean|psum|all_gather|ppermute|shard_map|device_put|PartitionSpec|NamedSharding|Mesh

# Folders of tests/ for `make newest`: the parts of fdg that a new version of JAX is most likely to break.
PARTS := tracing batch placing lowering running profiling

newest:
ifeq ($(NEWEST),)
	@echo 'not run: no Python 3.12 or 3.13'
else
	$(MAKE) test cartpole PYTHON="$(NEWEST)" VENV="$(VENV)-newest" EXTRAS=test LOCKED=constraints-newest.txt \
		ARGS="$(or $(ARGS),--numprocesses $(JOBS) --dist loadscope $(PARTS:%=tests/%))"
endif

# Fails if PPO does not solve CartPole-v1, which takes a mean return of at least 475.
cartpole: $(STAMP)
	"$(BIN)/python" -m fdg.train --env CartPole-v1 --out "$(VENV)/cartpole"
	@"$(BIN)/python" -c 'import json, sys; score = json.load(open(sys.argv[1]))["eval_return"]; \
		sys.exit(f"error: the mean return on CartPole-v1 is {score}, below 475" if score < 475 else None)' \
		"$(VENV)/cartpole/summary.json"
	@rm -rf "$(VENV)/cartpole"

lint: $(STAMP)
	"$(BIN)/ruff" format --check .
	"$(BIN)/ruff" check .
	"$(BIN)/mypy"
	PYTHONPATH=. "$(BIN)/lint-imports" --no-logo --no-cache
	@! grep -rnwE '$(DISTRIBUTION)' --include='*.py' algos envs \
		|| { echo 'error: distribution code in algos/ or envs/ (lines above): let a policy place the fragment' >&2; exit 1; }
	@mkdir -p build  # below, --quiet would let warnings pass
	@"$(BIN)/mkdocs" build --strict > build/site.log 2>&1 || { cat build/site.log; exit 1; }

# Silences Material for MkDocs' announcement of its successor at every start (docs/decisions/046).
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
