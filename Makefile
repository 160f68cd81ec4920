# make check   prove every op on this machine        make lint    style and types
# make test    run the test suite                    make bench   time every op next to its rivals
# make demo    train a tiny transformer with GRPO, and draw the curves
# make compat  compile and test every kernel under the oldest, the tested and the newest Triton
# make docs    build the site of the docs into site/
# make parity  make the environments in which the tests run TRL, verl and FLA (make test does)
# make engines run vLLM on a CPU with isobit inside, in an environment of its own: minutes, not a part of make test
# make tables  write the tables and charts of the pages from results/
# make release-check  build the sdist and the wheel, check them, and try the wheel in a fresh environment
# make hub     write the kernels as a repository of the Hugging Face Hub, into build/hub
# make stale   list result files of older kernels or with missing cases, and the commands that refresh them
# make shots   take the pictures of the documents again; needs Chromium
#
# Each sets up its own environment in .venv from whatever `python3` is (PYTHON=... for another one).

PYTHON ?= python3
BIN := .venv/bin
PUBLISH := PYTHONPATH=tools $(BIN)/python -m publish
READY := .venv/.ready
PARITY := .parity/.ready
ENGINES := .engines/.ready
DOCS := .venv/.docs
RELEASE := .venv/.release
BROWSER := .venv/.browser
APT := apt-get -qq -o Acquire::http::Timeout=30 -o Acquire::Retries=1
FLA := 0.6.0 0.5.2
# --no-compile: Python compiles a module when it is first imported, and most of the 12,000 never are. It must
# then be allowed to keep the result, or each of the hundreds of processes of the tests would compile PyTorch's
# 2,000 modules again. Some containers forbid it.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip
INSTALL := install --quiet --disable-pip-version-check --no-compile
INTO_VENV := $(PIP) $(INSTALL) -c constraints.txt
INTO_PARITY := $(PIP) --python .parity/bin/python $(INSTALL)
# Two processes of tests more than there are cores: tests wait for processes, browsers and timeouts, and with one
# more than two cores a fifth of these was idle. They take 1.5 GB each, so no more than four.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0)) + 2))' 2>/dev/null || echo 2)
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: check test lint demo compat parity engines bench tables stale shots docs release-check hub clean

check: $(READY)
	$(BIN)/isobit check --json check.json

test: $(READY) $(PARITY) $(BROWSER) $(DOCS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PUBLISH).tables --check

demo: $(READY)
	$(BIN)/isobit demo --html demo.html

# CHEAP=1 is the part for CI: no tests, one dtype, one target, the oldest Triton and the newest.
compat: $(READY)
	$(BIN)/python tools/compat.py $(if $(CHEAP),--cheap)

parity: $(PARITY)

engines: $(ENGINES)
	.engines/bin/python tests/vllm_on_a_cpu.py

bench: $(READY)
	$(BIN)/isobit bench --results results

tables: $(READY)
	$(PUBLISH).tables
	$(PUBLISH).vocabulary_chart results/h200/linear_logp.json docs/linear_logp.svg
	$(PUBLISH).drift results/h200/drift.json docs/drift.svg

stale: $(READY)
	$(PUBLISH).stale --only

shots: $(READY) $(BROWSER)
	$(BIN)/python tools/shots.py

# -W: a link that leads nowhere, or a page that is not in the navigation, is an error.
docs: $(DOCS)
	$(BIN)/python -m sphinx -W --keep-going -q -c tools/site -d site/.doctrees . site

# TAG=v0.1.0: the tag of the release, which must be that of the version.
release-check: $(RELEASE)
	$(BIN)/python tools/release.py

hub: $(READY)
	$(BIN)/python tools/hub.py build/hub

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INTO_VENV) torch triton numpy
	$(INTO_VENV) -e '.[dev]'
	touch $@

$(DOCS): $(READY)
	$(INTO_VENV) -e '.[docs]'
	touch $@

$(RELEASE): $(READY)
	$(INTO_VENV) -e '.[release]'
	touch $@

# verl needs an older transformers than .venv has. What is not in the list, torch above all, is that of .venv.
# FLA has a folder for each version, and the loader of the Hugging Face Hub one of its own: a test takes one of
# them on its path. Of what the loader needs, the rest is in .venv, or verifies signatures, which no test does.
$(PARITY): $(READY) tests/parity.txt
	rm -rf .parity
	$(BIN)/python -m venv --without-pip .parity
	$(BIN)/python -c '$(SITE)' > "$$(.parity/bin/python -c '$(SITE)')/shared.pth"
	$(INTO_PARITY) -r tests/parity.txt
	$(INTO_PARITY) --no-deps verl==0.9.1
	for v in $(FLA); do $(INTO_PARITY) --no-deps --target .parity/fla/$$v fla-core==$$v einops==0.8.2 || exit 1; done
	$(INTO_PARITY) --no-deps --target .parity/hub kernels==0.17.2 tomlkit==0.15.2
	touch $@

# vLLM on a CPU. Torch and what else is not in the list is that of .venv, isobit too: its folder is in a .pth file,
# which Python reads in a folder only if that is added as one of packages.
$(ENGINES): $(READY) tests/engines.txt
	rm -rf .engines
	$(BIN)/python -m venv --without-pip .engines
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" \
	  > "$$(.engines/bin/python -c '$(SITE)')/shared.pth"
	$(BIN)/python -m pip --python .engines/bin/python install --quiet --disable-pip-version-check --no-compile \
	  --no-deps -r tests/engines.txt
	touch $@

# Tests look at pages in a real Chromium. Root of a Debian gets one here. Without Chromium
# these tests are skipped, with a message.
$(BROWSER): $(READY)
	@$(BIN)/python tools/chromium.py || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && $(APT) update && $(APT) install -y --no-install-recommends chromium >/dev/null; } \
	  || echo "there is no Chromium here, and none could be installed: pages are not looked at"
	touch $@

clean:
	rm -rf .venv .compat .parity .engines site build dist check.json demo.html
