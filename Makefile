# Two commands are all the set-up there is: `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test test-trl test-verl test-vllm test-deepspeed test-liger check unit docs format bench dist clean

run: .venv/.ready  ## environment + training of the embedded model: minutes
	$(BIN)/adpo train

test: check unit  ## environment + lint + types + tests

test-verl: .venv-verl/.ready  ## an environment of its own: verl caps transformers below what the rest may use
	cd tests/on_verl && ../../.venv-verl/bin/python -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider

test-vllm: .venv-vllm/.ready  ## vLLM on the CPU, in an environment of its own (wheels for x86_64 and aarch64 on Linux)
	cd tests/on_vllm && ../../.venv-vllm/bin/python -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider

test-deepspeed: .venv/.ready build/deepspeed/.ready  ## DeepSpeed, built for the CPU, beside the environment's packages
	DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/build/deepspeed/extensions OMP_NUM_THREADS=1 \
		PATH=$(CURDIR)/build/deepspeed/packages/bin:$(CURDIR)/$(BIN):$$PATH PYTHONPATH=$(CURDIR)/build/deepspeed/packages \
		$(BIN)/pytest -q -p no:cacheprovider tests/on_deepspeed

test-liger: .venv/.ready build/liger/.ready  ## Liger's layers on the CPU, where triton's interpreter runs their kernels
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/build/liger/packages $(BIN)/pytest -q -p no:cacheprovider tests/on_liger

TRL ?= 1.16.0
test-trl: .venv/.ready  ## the trainers on another TRL: make test-trl TRL=1.17.0
	$(PYTHON) -m pip install --quiet --no-deps --upgrade --target build/trl-$(TRL) trl==$(TRL)
	PYTHONPATH=build/trl-$(TRL) $(BIN)/pytest -n 2 --dist worksteal -m "not slow and not gpu" tests/integrations tests/parity/test_trl.py

check: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: .venv/.ready
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not gpu"

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
	rm -rf .venv .venv-verl .venv-vllm build dist

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

# vLLM for CPUs asks for torchvision and torchaudio, which text does not need and which must fit its torch to the letter:
# the list is whole, and what it asks for is not looked at. pip is in it because a server reports what is installed.
.venv-vllm/.ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv --without-pip .venv-vllm
	$(PYTHON) -m pip --python .venv-vllm/bin/python install --quiet -c constraints-vllm.txt torch==2.13.0
	$(PYTHON) -m pip --python .venv-vllm/bin/python install --quiet --no-deps -r constraints-vllm.txt -e .
	touch $@

# DeepSpeed is a source build; its kernels are compiled when they are first used. A build that is killed leaves a lock
# in `extensions`, on which later ones would wait: `make clean` removes it.
build/deepspeed/.ready: .venv/.ready
	rm -rf build/deepspeed
	mkdir -p build/deepspeed
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PYTHON) -m pip --python $(BIN)/python install --quiet --no-deps \
		--no-build-isolation --target build/deepspeed/packages deepspeed==0.19.8 hjson==3.1.0 py-cpuinfo==9.0.0 \
		msgpack==1.2.4 einops==0.8.2 ninja==1.13.2 pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 \
		typing-inspection==0.4.5
	touch $@

build/liger/.ready: .venv/.ready
	rm -rf build/liger
	mkdir -p build/liger
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --no-deps --target build/liger/packages \
		liger-kernel==0.8.5 triton==3.9.0
	touch $@
