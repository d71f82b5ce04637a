# make demo: compile an example, train it, compare it with the plain model
# make test: everything that must hold before a commit

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test clean

demo: $(INSTALLED)
	$(BIN)/fxpipe compile examples/unet.py --devices 2 -o build/unet
	$(BIN)/python examples/train.py build/unet examples/unet.py

test: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses 2 --dist loadfile

clean:
	rm -rf .venv build dist fxpipe.egg-info .mypy_cache .ruff_cache .pytest_cache

# torch first: then pip finds the build for this machine and all else fits to it.
$(INSTALLED): pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0 -c constraints.txt
	$(BIN)/pip install --quiet -e '.[examples,dev]' -c constraints.txt
	touch $@
