# pyenv compiles Python without optimizations, with which the tests take four fifths of the time: where the system has the
# same version, that one.
ifndef PYTHON
UNOPTIMIZED := import sys, sysconfig as s; print("%d.%d" % sys.version_info[:2] \
  if "pyenv" in sys.base_prefix and "--enable-optimizations" not in (s.get_config_var("CONFIG_ARGS") or "") else "")
PYTHON := $(shell version=$$(python3 -c '$(UNOPTIMIZED)' 2>/dev/null); [ -n "$$version" ] \
  && /usr/bin/python$$version -c 'import ensurepip' 2>/dev/null && echo /usr/bin/python$$version || echo python3)
endif
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# DeepSpeed compiles its kernels when they are first used, so setting up needs no compiler. Building its sdist in
# isolation (PEP 517, whatever pip's age) never asks for a second torch.
export DS_BUILD_OPS := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_USE_PEP517 := 1

.DEFAULT_GOAL := help
.PHONY: help setup train test coverage docs wheel compatibility lint style types native suite compiler clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22
	@echo "  PYTHON=python3.12 picks the interpreter. The packages come from pip's own configuration:"
	@echo "  set PIP_INDEX_URL or PIP_FIND_LINKS to choose another build of torch."

setup: $(READY) ## create .venv with everything in it

train: $(READY) ## train the quickstart recipe; make train ARGS="--steps 50"
	$(BIN)/axonn train quickstart $(ARGS)

test: style compiler ## lint, and run the tests; make test ARGS="-k mesh"
	@# mypy takes a minute of one core, and so runs beside the tests; so does compiling pccl, which each test worker would do on
	@# its one core.
	@$(MAKE) --no-print-directory -j 3 native types suite

RUN := python
# Two files of tests at a time: most start ranks, but some wait, and some compute in one process. tests/conftest.py orders them.
suite:
	OMP_NUM_THREADS=1 $(BIN)/$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20 --durations-min=1 $(ARGS)

coverage: $(VENV)/.coverage compiler ## run the tests, in twice their time, and list the files outside of them with lines that none reaches
	@$(MAKE) --no-print-directory native
	$(BIN)/coverage erase
	$(MAKE) --no-print-directory suite RUN="coverage run"
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

docs: $(VENV)/.docs ## build the documentation into the folder site, without network once its tools are there
	$(BIN)/python docs/code/build.py

# The tools alone: with the package, pip would build it anew each time, and look all that it stands on up.
EXTRA := import sys; from configparser import ConfigParser as C; c = C(); c.read("setup.cfg"); print(*c["options.extras_require"][sys.argv[1]].split())
$(VENV)/.docs $(VENV)/.coverage: $(VENV)/.%: $(READY)
	$(BIN)/pip install -q --no-compile -c constraints.txt $$($(BIN)/python -c '$(EXTRA)' $*)
	@touch $@

wheel: $(READY) ## build sdist and wheel into dist, and check the wheel alone in a bare environment
	$(BIN)/python -m tests.release.wheel

compatibility: $(READY) compiler ## run what can be of each version of Python, torch and the hosts; write docs/reference/compatibility.md
	$(BIN)/python -m tests.release.compatibility --write docs/reference/compatibility.md

lint: style types ## ruff and mypy

style: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

native: $(READY)
	@$(BIN)/python -c 'from axonn_plugins.pccl.build import load; load()'

# Stock DeepSpeed, which the tests compare with, compiles a small kernel when it starts on a CPU.
compiler:
	@command -v c++ >/dev/null || { $(call APT,g++,A C++ compiler); }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' || { $(call APT,python3-dev,Python.h); }

clean: ## remove .venv and what the tools leave behind (never runs/)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): setup.cfg setup.py constraints.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: install Python 3.10 or newer, or name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python %d.%d is too old: axonn-plugins needs 3.10 or newer; name one with make PYTHON=..." % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { $(call APT,python$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv,Python's venv module); }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile -c constraints.txt torch
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[dev]'
	@# LitGPT, a model of the tests, asks for an older huggingface-hub than transformers does; its model needs none.
	$(BIN)/pip install -q --no-compile --no-deps -c constraints.txt litgpt lightning lightning-utilities torchmetrics
	$(BIN)/pip install -q --no-compile -c constraints.txt 'jsonargparse[signatures]>=4.37,<=4.41' requests
	@# On all cores, which pip does not; some packages hold templates that are no Python. Ours too, which every rank imports
	@# even where PYTHONDONTWRITEBYTECODE is set.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@$(BIN)/python -m compileall -q -j 0 axonn_tp plugins recipes samo ted_moe
	@touch $@

# Debian ships parts of Python, and a compiler, in packages of their own. $(1): packages, $(2): what is missing.
define APT
sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
if ! command -v apt-get >/dev/null || ! command -v $${sudo:-true} >/dev/null; then \
  echo "$(2) is missing: install it (on Debian: apt-get install $(1)) and try again." >&2; exit 1; \
fi; \
$$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(1)
endef
