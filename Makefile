# Needs make and Python 3.11 or newer; everything else goes into .venv, in the versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
DEV := $(VENV)/.dev
AUDIT := $(VENV)/audit
LLM := $(VENV)/.llm
MUTATE := $(VENV)/.mutate
ENDS := $(VENV)/oldest $(VENV)/newest
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

# An environment that was moved, or has lost its Python, is made anew.
$(shell [ -x $(BIN)/python ] && grep -qxF -- "$(CURDIR)" $(BASE) 2>/dev/null || rm -f $(BASE) $(DEV) $(LLM) $(MUTATE))

.PHONY: help figure1 llm test check rounding oldest newest slow fuzz mutate bench audit docs clean

SECONDS ?= 600

help: ## show this list
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/make \1 - \2/p' $(firstword $(MAKEFILE_LIST))

figure1: $(BASE) ## regenerate Figure 1 into out/: png, pdf, csv, json
	$(BIN)/klgrad figure1 --seed 0 --out out

llm: export OMP_NUM_THREADS = 1# a model this small loses more to threads than it gains
llm: $(LLM) ## teach a tiny language model, train it with a KL, and draw its Figure 1 into out/
	$(BIN)/klgrad llm pretrain --out out/tiny
	$(BIN)/klgrad llm train tiny-rloo --set steps=30 --resume --out out/llm
	$(BIN)/klgrad llm probe --policy out/llm/step-30 --reference out/tiny --out out

test: check ## lint, types, a part of the tests under two other arithmetics, and every test that is not slow
	$(BIN)/python tests/rounding/run.py --part baseline avx2
	$(BIN)/python -m pytest -n 2

check: $(DEV) ## lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

rounding: $(DEV) ## every test that is not slow, under each arithmetic this machine has; VARIATIONS="hash-0 avx2" for some
	$(BIN)/python tests/rounding/run.py $(VARIATIONS)

oldest: $(VENV)/oldest/.ready ## every test that is not slow, with the lowest versions that pyproject.toml allows
	@head -1 $(VENV)/oldest/pins.txt
	$(VENV)/oldest/bin/python -m pytest -n 2

newest: $(VENV)/newest/.ready ## the same with the newest that the registry has
	@head -1 $(VENV)/newest/pins.txt
	$(VENV)/newest/bin/python -m pytest -n 2

slow: $(DEV) ## the slow tests
	$(BIN)/python -m pytest -n 2 -m slow

fuzz: $(DEV) ## extreme models and odd input, other seeds each round, for SECONDS=600
	@seed=$$(date +%s); end=$$((seed + $(SECONDS))); while [ $$(date +%s) -lt $$end ]; do \
	  seed=$$((seed + 1)); echo "fuzz: seed $$seed"; HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -q -n 2 \
	  -m "slow or not slow" --hypothesis-seed=$$seed tests/fuzz || exit 1; done

mutate: $(MUTATE) ## every small wrong change of the core must fail a test; an hour, goes on where it was interrupted
	$(BIN)/python tests/mutation/run.py $(MODULES)

bench: $(BASE) ## time and memory, against plain PyTorch
	$(BIN)/python benchmarks/run.py

audit: $(AUDIT)/.ready ## the libraries' own KL functions against what klgrad says of them (installs them, apart)
	$(AUDIT)/bin/klgrad audit

docs: $(DEV) ## the documentation site, into out/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean: ## remove .venv, caches and build leftovers; out/ stays
	rm -rf $(VENV) build dist klgrad.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BASE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "klgrad needs Python 3.11 or newer and '$(PYTHON)' is not: name one, as in make PYTHON=python3.12" >&2; exit 1; }
	@[ -f $@ ] || $(PYTHON) -m venv --clear $(VENV) >/dev/null || \
	  { echo "'$(PYTHON) -m venv' failed: install Python's venv module (python3-venv on Debian and Ubuntu)" >&2; exit 1; }
	@echo "installing klgrad and what it needs into $(VENV) (once)"
	@$(PIP) -e .
	@echo "$(CURDIR)" > $@

$(LLM): $(BASE)
	@echo "installing what language models need into $(VENV) (once)"
	@$(PIP) -e ".[llm]"
	@touch $@

$(DEV): $(BASE)
	@echo "installing the development tools into $(VENV) (once)"
	@$(PIP) -e ".[dev,docs]"
	@rm -rf $(VENV)/typing && mkdir -p $(VENV)/typing/klgrad
	@ln -s $(addprefix ../../../,$(wildcard *.py) $(patsubst %/__init__.py,%,$(wildcard */__init__.py))) $(VENV)/typing/klgrad
	@touch $@

$(MUTATE): $(DEV)
	@echo "installing the mutation tool into $(VENV) (once)"
	@$(PIP) -e ".[mutation]"
	@touch $@

$(ENDS:=/.ready): $(VENV)/%/.ready: pyproject.toml constraints.txt tests/bounds/pins.py $(BASE)
	@echo "installing the $* versions that pyproject.toml allows into $(VENV)/$* (once)"
	@$(PYTHON) -m venv --clear $(VENV)/$* >/dev/null
	@$(PYTHON) tests/bounds/pins.py $* > $(VENV)/$*/pins.txt
	@$(VENV)/$*/bin/python -m pip install -q --disable-pip-version-check -r $(VENV)/$*/pins.txt -e .
	@touch $@

$(AUDIT)/.ready: $(BASE) tests/audit/light.txt tests/audit/bare.txt
	@echo "installing the libraries to be audited into $(AUDIT) (once)"
	@$(PYTHON) -m venv --clear $(AUDIT) >/dev/null
	@$(AUDIT)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e . -r tests/audit/light.txt
	@$(AUDIT)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps -r tests/audit/bare.txt
	@touch $@
