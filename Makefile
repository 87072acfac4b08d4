# Two commands do everything on a fresh machine: `make demo` and `make test`.
# They need Python 3.11 or newer with its venv module, and nothing else.
#
#   make demo DEMO_ARGS="--no-browser --port 8000"        options of `streamgen play`
#   make test TEST_ARGS="tests/cache -x"                  options of pytest
#   make demo PYTHON=/path/to/python3.12                  another interpreter
#   make demo TORCH_INDEX_URL=<index>                     torch from one of PyTorch's own wheel indexes
#                                                         (a CPU build on Linux; a given CUDA version)

VENV := .venv
BIN := $(VENV)/bin
WHEEL_VENV := build/wheel-venv
DEMO_ARGS ?=
TEST_ARGS ?= -q

# The first interpreter that is new enough and can make a virtual environment.
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
    $$p -c "$(USABLE)" 2>/dev/null && { echo $$p; break; }; done)

.PHONY: demo test gpu setup style types bench eval wheel clean

demo: $(VENV)/.installed
	$(BIN)/streamgen play $(DEMO_ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow" $(TEST_ARGS)

gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu $(TEST_ARGS)

setup: $(VENV)/.installed-dev

style: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# ruff always; mypy (strict) and pyright where they are installed
types: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	@for tool in mypy pyright; do \
	    if [ -x $(BIN)/$$tool ]; then echo "$(BIN)/$$tool"; $(BIN)/$$tool || exit 1; \
	    else echo "$$tool: not installed, skipped ($(BIN)/pip install $$tool)"; fi; done

bench: $(VENV)/.installed
	$(BIN)/streamgen bench world
	$(BIN)/streamgen bench video
	$(BIN)/streamgen bench image

eval: $(VENV)/.installed
	$(BIN)/streamgen eval pocket-world
	$(BIN)/streamgen eval pocket-video -o out/eval-video
	$(BIN)/streamgen eval pocket-image -o out/eval-image

# The wheel must work where the repository is not: a fresh environment, run from another folder.
wheel: $(VENV)/.installed-dev
	rm -rf build dist
	$(BIN)/python -m build --wheel
	$(BIN)/python -m venv $(WHEEL_VENV)
	$(call install-torch,$(WHEEL_VENV)/bin/python)
	$(WHEEL_VENV)/bin/python -m pip install -c constraints.txt dist/*.whl
	here=$$(pwd) && cd / && $$here/$(WHEEL_VENV)/bin/streamgen doctor
	here=$$(pwd) && cd / && $$here/$(WHEEL_VENV)/bin/streamgen play --frames 8 -o $$here/build/walk.mp4
	here=$$(pwd) && cd / && $$here/$(WHEEL_VENV)/bin/streamgen generate "a red brick maze" --frames 8 \
	    -o $$here/build/film.mp4
	here=$$(pwd) && cd / && $$here/$(WHEEL_VENV)/bin/streamgen image --class "lava, brick" \
	    -o $$here/build/picture.png

# what builds and tests leave behind; remove $(VENV) by hand to install anew
clean:
	rm -rf build dist streamgen.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch alone and first, so that the big download is one step whose source can be chosen.
install-torch = $(1) -m pip install \
    $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "$$(grep '^torch==' constraints.txt)"

$(VENV)/.installed: pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] && $(PYTHON) -c "$(USABLE)" || { echo "error: streamgen needs Python 3.11 or \
	newer with its venv module. Found: $$(python3 --version 2>&1 || echo none). Install one (on Debian or \
	Ubuntu: apt install python3 python3-venv) or name yours: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(call install-torch,$(BIN)/python)
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	@touch $@
