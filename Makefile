# Two commands are all the set-up there is: `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test test-verl check unit docs format bench dist clean

run: .venv/.ready  ## environment + training of the embedded model: minutes
	$(BIN)/adpo train

test: check unit  ## environment + lint + types + tests

test-verl: .venv-verl/.ready  ## an environment of its own: verl caps transformers below what the rest may use
	cd tests/on_verl && ../../.venv-verl/bin/python -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider

check: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: .venv/.ready
	$(BIN)/pytest -n 2 -m "not slow and not gpu"

docs: .venv/.ready  ## the documentation as a site in build/docs; a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.ready
	$(BIN)/python -m adpo.bench core

dist:  ## wheel and sdist, checked; the wheel tried out in an environment that has nothing else
	rm -rf dist build/tools build/clean build/smallest
	$(PYTHON) -m venv --without-pip build/tools
	$(PYTHON) -m pip --python build/tools/bin/python install --quiet -c constraints.txt build twine
	build/tools/bin/python -m build --outdir dist
	build/tools/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv --without-pip build/clean
	$(PYTHON) -m pip --python build/clean/bin/python install --quiet -c constraints.txt torch==2.13.0
	$(PYTHON) -m pip --python build/clean/bin/python install --quiet -c constraints.txt "$$(echo dist/*.whl)[lm]"
	cd build && clean/bin/adpo taxonomy
	cd build && clean/bin/adpo train --out smallest --max_steps 2 --eval_problems 20 --dev_problems 0

clean:
	rm -rf .venv .venv-verl build dist

# torch goes in first and alone: its exact pin keeps every later package from choosing another build.
# pip runs from outside the environment, so a Python without ensurepip works as well.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --without-pip .venv
	$(PYTHON) -m pip --python $(BIN)/python install --quiet -c constraints.txt pip torch==2.13.0
	$(PYTHON) -m pip --python $(BIN)/python install --quiet -c constraints.txt -e '.[dev]'
	touch $@

.venv-verl/.ready: pyproject.toml constraints-verl.txt
	$(PYTHON) -m venv --without-pip .venv-verl
	$(PYTHON) -m pip --python .venv-verl/bin/python install --quiet -c constraints-verl.txt torch==2.13.0
	$(PYTHON) -m pip --python .venv-verl/bin/python install --quiet -c constraints-verl.txt -e '.[verl]' pytest hypothesis
	touch $@
