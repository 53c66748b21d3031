# Each target sets itself up in .venv on a fresh machine with python3 >= 3.10.
#   make demo       the main job on the shipped tiny model; everything it writes is under outputs/demo
#   make test       the tests (about five minutes on two cores)
#   make test-all   all of them, the long ones included
#   make clean      remove outputs/demo
# Another torch build: make demo TORCH=torch==2.11.0

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN = .venv/bin
DEMO = outputs/demo

.PHONY: demo test test-all clean

demo: .venv/installed
	$(BIN)/python data/make_arithmetic.py --n 40 --out $(DEMO)/problems.jsonl
	$(BIN)/python Gradient_evaluation/calculate_oracle_v.py --model data/tiny_model \
		--dataset $(DEMO)/problems.jsonl --n_oracle 500 --batch_size 500 --out_dir $(DEMO)
	$(BIN)/python Gradient_evaluation/run_tracecov.py --model data/tiny_model \
		--oracle_table $(DEMO)/oracle_v_n500_tiny_model.jsonl --K_list 4 8 16 32 64 --M 8 --gen_bs 512 \
		--save_json $(DEMO) --plot_path $(DEMO)

test: .venv/installed
	$(BIN)/python -m pytest -q -m "not slow" tests

test-all: .venv/installed
	$(BIN)/python -m pytest -q tests

clean:
	rm -rf $(DEMO)

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: $(PYTHON) is older than 3.10; name a newer one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -m venv .venv || \
		{ echo "error: $(PYTHON) has no venv module; on Debian: apt install python3-venv" >&2; exit 2; }
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -r requirements.txt
	@touch $@
