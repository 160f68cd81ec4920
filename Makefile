# make check   prove every op on this machine        make lint    style and types
# make test    run the test suite                    make bench   time every op beside its rivals
# make demo    train a tiny transformer with GRPO, and draw the curves
# make compat  compile and test every kernel under the oldest, the tested and the newest Triton
# make parity  make the environments in which the tests run TRL, verl and FLA (make test does)
#
# Each sets up its own environment in .venv from whatever `python3` is (PYTHON=... for another one).

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PARITY := .parity/.ready
FLA := 0.6.0 0.5.2
INTO_PARITY := $(BIN)/python -m pip --python .parity/bin/python install --quiet --disable-pip-version-check --no-compile
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: check test lint demo compat parity bench tables clean

check: $(READY)
	$(BIN)/isobit check --json check.json

test: $(READY) $(PARITY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m isobit.bench.tables --check README.md docs/linear_logp.md docs/ratio_kl.md docs/grpo_loss.md docs/delta_rule.md

demo: $(READY)
	$(BIN)/isobit demo --html demo.html

# CHEAP=1 is the part for CI: no tests, one dtype, one target, the oldest Triton and the newest.
compat: $(READY)
	$(BIN)/python tools/compat.py $(if $(CHEAP),--cheap)

parity: $(PARITY)

bench: $(READY)
	$(BIN)/isobit bench --results results

tables: $(READY)
	$(BIN)/python -m isobit.bench.tables README.md docs/linear_logp.md docs/ratio_kl.md docs/grpo_loss.md docs/delta_rule.md
	$(BIN)/python -m isobit.ops.linear_logp.chart results/h200/linear_logp.json docs/linear_logp.svg

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch triton numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# verl needs an older transformers than .venv has. What is not in the list, torch above all, is that of .venv.
# FLA has a folder for each version: a test takes one of them on its path.
$(PARITY): $(READY) tests/parity.txt
	rm -rf .parity
	$(BIN)/python -m venv --without-pip .parity
	$(BIN)/python -c '$(SITE)' > "$$(.parity/bin/python -c '$(SITE)')/shared.pth"
	$(INTO_PARITY) -r tests/parity.txt
	$(INTO_PARITY) --no-deps verl==0.9.1
	for v in $(FLA); do $(INTO_PARITY) --no-deps --target .parity/fla/$$v fla-core==$$v einops==0.8.2 || exit 1; done
	touch $@

clean:
	rm -rf .venv .compat .parity check.json demo.html
