# Lockstep's commands. `make demo` and `make test` are the two a newcomer needs; both make what they
# need first. PYTHON names the interpreter that .venv is made from (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
PIP := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip
PYTEST := $(BIN)/pytest
ONE_AT_A_TIME := $(shell command -v flock > /dev/null && echo flock build/native/.lock)
INSTALL_INPUTS := pyproject.toml constraints.txt
PEERS := llama_cpp openvino onnxruntime vllm trl
BENCH_PAGE := --markdown README.md --plot benchmarks/results

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-isas sanitize sanitize-all check format docs bench bench-full bench-peers native wheel clean

help:  ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.dev native  ## Make .venv with everything development needs

demo: .venv/.run  ## From checkpoint to served answer on SmolLM2-135M, in at most 10 minutes
	$(BIN)/lockstep demo

test: setup  ## Run the tests that need no download (at most 10 minutes on 2 cores)
	$(PYTEST)

test-all: setup  ## Run every test, the slow ones on the real model included
	$(PYTEST) -m "not gpu"

# The contract on every instruction set this CPU has; the kernels' own tests go through them all by
# themselves.
test-isas: setup  ## Run the contract suite once for each instruction set
	@for isa in $$($(BIN)/python -c 'from lockstep import kernels; print(*(name for name, lacks in kernels.isas().items() if not lacks))'); do \
	  echo "== LOCKSTEP_ISA=$$isa"; LOCKSTEP_ISA=$$isa $(PYTEST) tests/contract -q || exit 1; done

# tests/native calls each kernel on buffers of exactly the size it is promised. One array path and one
# vector path here; sanitize-all has every instruction set, and the thread pool under ThreadSanitizer.
sanitize: SANITIZED_ISAS := portable;avx512bf16
sanitize: .venv/.dev  ## Run the native test cases under AddressSanitizer and UBSan
	$(call native_cases,sanitize,address$(comma)undefined$(comma)float-cast-overflow,$(SANITIZED_ISAS))

sanitize-all: .venv/.dev  ## The same on all instruction sets, and under ThreadSanitizer
	$(call native_cases,sanitize-all,address$(comma)undefined$(comma)float-cast-overflow,)
	$(call native_cases,sanitize-thread,thread,portable)

comma := ,
define native_cases
	@mkdir -p build/$(1)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh -ec '\
	  cmake -S . -B build/$(1) -G Ninja -DLOCKSTEP_SANITIZE=$(2) "-DLOCKSTEP_ISAS=$(3)" > build/$(1)/cmake.log; \
	  cmake --build build/$(1) --target native_cases'
	build/$(1)/native_cases > build/$(1)/checksums.txt
	@echo "$(1): $$(wc -l < build/$(1)/checksums.txt) cases, nothing found"
endef

check: setup  ## Lint, format, types, layers, sizes, links, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/check_sizes.py
	$(BIN)/python scripts/check_links.py
	$(BIN)/python scripts/check_native_symbols.py
	$(BIN)/python scripts/write_tour.py --check

format:  ## Let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs:  ## Rewrite the tour of the code in docs/architecture.md
	$(BIN)/python scripts/write_tour.py

# On idle cores. The first run makes the peers' environments and models, which takes half an hour.
bench: setup bench-peers  ## Measure serving beside the peers (20 minutes): table, plot, README.md
	$(BIN)/python benchmarks/side_by_side.py --only prefill,ttft,decode,serve --rounds 2 $(BENCH_PAGE)

bench-full: setup bench-peers  ## Measure all of it: more rounds, fp32, the larger model, kernels (hours)
	$(BIN)/python benchmarks/side_by_side.py --precisions bf16,int8,int4,shipped,fp32 --rounds 5
	$(BIN)/python benchmarks/side_by_side.py --model qwen --rounds 3 $(BENCH_PAGE)
	$(BIN)/python benchmarks/contract_cost.py
	$(BIN)/python benchmarks/linear_beside_torch.py

bench-peers: $(PEERS:%=.benchmarks/venvs/%/.ready)  ## Make the peers' virtual environments

# A second or two after a change: rebuilds what changed and puts the library next to its sources.
native: .venv/.dev  ## Rebuild the native CPU kernels in place
	@mkdir -p build/native
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(ONE_AT_A_TIME) sh -ec '\
	  test -f build/native/build.ninja || cmake -S . -B build/native -G Ninja; \
	  cmake --build build/native'

wheel: .venv/.dev  ## Build the wheel into dist/
	$(PIP) wheel . --no-deps --wheel-dir dist

clean:  ## Remove build outputs and caches, not .venv and not runs/
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f src/lockstep/kernels/liblockstep_native.so
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Lockstep needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}; call make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

# What a user gets: pip builds the kernels on the way.
.venv/.run: $(INSTALL_INPUTS) | .venv/bin/pip
	$(PIP) install --progress-bar on -e .
	@touch $@

# What a developer gets: the kernels are left to `make native`, which builds only what changed.
.venv/.dev: $(INSTALL_INPUTS) | .venv/bin/pip
	$(PIP) install -C wheel.cmake=false -e '.[dev]'
	@touch .venv/.run $@

# A peer in an environment of its own, of exactly the packages listed.
.benchmarks/venvs/%/.ready: benchmarks/peers/%.txt
	test -x .benchmarks/venvs/$*/bin/pip || $(PYTHON) -m venv .benchmarks/venvs/$*
	PIP_DISABLE_PIP_VERSION_CHECK=1 .benchmarks/venvs/$*/bin/pip install --no-deps -r $<
	@touch $@
