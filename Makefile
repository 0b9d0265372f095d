# make setup prepares .venv and nothing else; the other targets call it.
VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.retire-setup
LOCK  := requirements/cpu.txt
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: setup demo serve test lint clean
.DELETE_ON_ERROR:

setup: $(STAMP)

# The first interpreter that runs, is new enough and can make environments.  The lock was seen to work with 3.11.
# A .venv without a working pip is a broken or interrupted one: it is made anew.
$(STAMP): $(LOCK) pyproject.toml
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  for python in python3.11 python3.12 python3.13 python3; do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	      echo "setup: $$($$python --version) -> $(VENV)"; exec $$python -m venv --clear $(VENV); \
	    fi; \
	  done; \
	  echo "setup: no usable python3.11 or later found (with venv and ensurepip)" >&2; exit 1; \
	fi
	$(PY) -m pip install --quiet --no-deps -r $(LOCK)
	$(PY) -m pip install --quiet --no-deps -e .
	@$(PY) -c 'import torch, transformers' || { \
	  echo "setup: torch does not load here; a build of it for CPUs is needed (PIP_EXTRA_INDEX_URL can name its index)" >&2; exit 1; }
	@touch $@

demo: setup
	$(VENV)/bin/retire demo

serve: setup
	$(VENV)/bin/retire serve smollm2

lint: setup
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache

test: setup
	$(VENV)/bin/retire model get smollm2
	@$(MAKE) --no-print-directory lint
	$(PY) -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
