# Each target sets itself up in .venv on a fresh machine with python3 >= 3.10.
#   make demo       the main job on the shipped tiny model; everything it writes is under outputs/demo
#   make test       the linter and the tests (about five minutes on two cores)
#   make lint       ruff alone: format and lint
#   make test-all   all of them, the long ones included
#   make report     every picture of a run in one HTML file: make report RESULTS=outputs/qwen/tracecov_qwen.json
#                   (several results files in quotes: they are drawn beside the first)
#   make clean      remove outputs/demo
# Another torch build: make demo TORCH=torch==2.11.0

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN = .venv/bin
DEMO = outputs/demo
RESULTS ?= outputs/demo/tracecov_tiny_model.json

.PHONY: demo lint test test-all report clean

# a model this small gains nothing from threads, and loses much on a busy machine
demo: export OMP_NUM_THREADS ?= 1
demo: .venv/installed
	$(BIN)/python data/make_arithmetic.py --n 40 --out $(DEMO)/problems.jsonl
	$(BIN)/python Gradient_evaluation/calculate_oracle_v.py --model data/tiny_model \
		--dataset $(DEMO)/problems.jsonl --n_oracle 400 --batch_size 400 --out_dir $(DEMO)
	$(BIN)/python Gradient_evaluation/run_tracecov.py --model data/tiny_model \
		--oracle_table $(DEMO)/oracle_v_n400_tiny_model.jsonl --K_list 4 8 16 32 64 --M 4 --gen_bs 256 \
		--save_json $(DEMO) --plot_path $(DEMO)

lint: .venv/installed
	$(BIN)/python -m ruff format --check --quiet .
	$(BIN)/python -m ruff check --quiet .

test: lint
	$(BIN)/python -m pytest -q -m "not slow" tests

test-all: .venv/installed
	$(BIN)/python -m pytest -q tests

# as it was given: a path may hold a space, a quote or a dollar
report: export REPORTED := $(value RESULTS)
report: .venv/installed
	@if [ -f "$$REPORTED" ]; then set -- "$$REPORTED"; else eval "set -- $$REPORTED"; fi && \
		$(BIN)/python plots/make_report.py "$$@"

clean:
	rm -rf $(DEMO)

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: $(PYTHON) is older than 3.10; name a newer one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -m venv .venv || \
		{ echo "error: $(PYTHON) has no venv module; on Debian: apt install python3-venv" >&2; exit 2; }
	@echo "installing into .venv: about three minutes"
	$(BIN)/pip install -qq --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install -qq --disable-pip-version-check -r requirements.txt
	@touch $@

# Real VERL training on the CPU (tests/verl_cpu): its own environment of 4 GB; train, kill, continue, measure.
TRAIN_ENV = outputs/verl_cpu/venv
.PHONY: test-train

test-train: .venv/installed $(TRAIN_ENV)/installed
	$(BIN)/python tests/verl_cpu/train_for_real.py --env $(TRAIN_ENV)

$(TRAIN_ENV)/installed: tests/verl_cpu/requirements.txt tests/verl_cpu/vllm_stub/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.platform != "linux" or not (3, 10) <= sys.version_info[:2] < (3, 13))' || \
		{ echo "error: VERL needs Linux and Python 3.10 to 3.12; name one: make test-train PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(TRAIN_ENV)
	$(TRAIN_ENV)/bin/pip install --quiet torch==2.13.0
	$(TRAIN_ENV)/bin/pip install --quiet -r tests/verl_cpu/requirements.txt
	$(TRAIN_ENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@rm -rf $(TRAIN_ENV)/vllm_stub && cp -r tests/verl_cpu/vllm_stub $(TRAIN_ENV)/vllm_stub
	$(TRAIN_ENV)/bin/pip install --quiet $(TRAIN_ENV)/vllm_stub
	@touch $@
