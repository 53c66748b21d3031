#!/usr/bin/env bash
# The group size against accuracy at a fixed budget: one training run for each G (and seed), one after the other.
#
#   bash Policy_Optimization/sweep_group_size.sh --dry_run --group_sizes 4 8 16 32 64 128 --seeds 0 1 2
#   MODEL=/models/qwen bash Policy_Optimization/sweep_group_size.sh --sweep_dir outputs/sweep --seeds 0 1 2
#   bash Policy_Optimization/sweep_group_size.sh --recommended outputs/qwen/tracecov_qwen.json -- trainer.save_freq=50
#
# The sweep's own flags: --group_sizes or --recommended (--allow_mismatch), --seeds, --sweep_dir, --budget,
# --update_budget, --epoch_budget, --env, --dry_run. Every other setting of grpo_train.sh is given as an environment variable
# (MODEL, TRAIN_FILES, GPUS_PER_NODE, ...), and what follows -- goes to VERL unchanged, in every run.
# All runs are checked before the first one starts. The same command goes on after an interruption: finished runs
# are skipped, the others continue from their checkpoints. plots/plot_training.py reads SWEEP_DIR/manifest.json. Exit code: 0,
# 2 for a wrong setting, 1 if a run failed (the others are still run), 130 or 143 if it was stopped.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# The plan needs Python alone, so any one does; training takes the one of --env.
python="$(command -v python || command -v python3)" || {
  echo "error: there is no python here" >&2
  exit 2
}
exec "$python" "$here/sweep.py" "$@"
