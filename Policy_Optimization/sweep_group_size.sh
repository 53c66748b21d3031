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
python_flags=() plan_flags=() verl=() dry_run=0 sweep_dir="${SWEEP_DIR:-outputs/sweep}"
while (($#)); do
  case $1 in
    --)
      shift
      verl=(-- "$@")
      break
      ;;
    --dry_run) dry_run=1 ;;
    -h | --help)
      sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --env | --sweep_dir)
      (($# > 1)) || {
        echo "error: $1: a value is missing" >&2
        exit 2
      }
      if [[ $1 == --env ]]; then python_flags=(--env "$2"); else sweep_dir="$2"; fi
      shift
      ;;
    *) plan_flags+=("$1") ;;
  esac
  shift
done

# The plan needs Python alone, so any one does; training takes the one of --env.
python="$(command -v python || command -v python3)" || {
  echo "error: there is no python here" >&2
  exit 2
}
[[ $sweep_dir == /* ]] || sweep_dir="$PWD/$sweep_dir"
if ((dry_run)); then plan_flags+=(--dry_run); fi
list="$(mktemp)"
trap 'rm -f -- "$list"' EXIT
"$python" "$here/sweep_manifest.py" --sweep_dir "$sweep_dir" "${plan_flags[@]}" "${verl[@]}" >"$list"
mapfile -d '' -t todo <"$list"
export HF_HOME="${HF_HOME:-$sweep_dir/cache/huggingface}" # one copy of a hub model for all runs

launch() { # SIZE SEED RUN [more flags of the launcher]
  local rollouts=()
  if [[ -n ${SAVE_ROLLOUTS:-} ]]; then rollouts=(--save_rollouts "$SAVE_ROLLOUTS/$3"); fi # a folder for each run
  # Sizes, seeds and folders are the sweep's: these flags win over variables of the same names.
  env -u TRAIN_BATCH_SIZE -u MINI_BATCH_SIZE -u EPOCHS -u EXPERIMENT -u EXPERIMENT_NAME \
    bash "$here/grpo_train.sh" "${python_flags[@]}" "${@:4}" --group_size "$1" --seed "$2" \
    --run_dir "$sweep_dir/$3" "${rollouts[@]}" "${budget_flags[@]}" "${verl[@]}"
}
budget_flags=()
for ((i = 0; i < ${#plan_flags[@]}; i++)); do
  case ${plan_flags[i]} in
    --budget | --update_budget | --epoch_budget) budget_flags+=("${plan_flags[i]}" "${plan_flags[i + 1]}") ;;
    --budget=* | --update_budget=* | --epoch_budget=*) budget_flags+=("${plan_flags[i]}") ;;
  esac
done

for ((i = 0; i < ${#todo[@]}; i += 3)); do
  echo "checking G = ${todo[i]}, seed ${todo[i + 1]}" >&2
  if ((dry_run && i == 0)); then # the others differ in what follows from G and the seed
    launch "${todo[@]:i:3}" --dry_run || exit $?
  else
    launch "${todo[@]:i:3}" --dry_run >/dev/null || exit $?
  fi
done
if ((dry_run)); then
  ((${#todo[@]} == 0)) || echo "all $((${#todo[@]} / 3)) runs can start; shown is the first"
  exit 0
fi

failed=0 stopped=0 child=
trap 'stopped=130; kill -TERM "$child" 2>/dev/null || true' INT
trap 'stopped=143; kill -TERM "$child" 2>/dev/null || true' TERM
for ((i = 0; i < ${#todo[@]}; i += 3)); do
  code=0
  launch "${todo[@]:i:3}" &
  child=$!
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do
    code=0
    wait "$child" || code=$?
  done
  if ((stopped)) || ((code == 130)) || ((code == 143)); then
    echo "stopped at ${todo[i + 2]}; the same command goes on from there" >&2
    exit $((stopped ? stopped : code))
  elif ((code)); then
    failed=$((failed + 1))
  fi
done
if ((failed)); then
  echo "error: $failed of the runs failed; their logs are in $sweep_dir/*/logs; the same command tries them again" >&2
  exit 1
fi
echo "all runs are finished: python plots/plot_training.py $sweep_dir/manifest.json --out figure.pdf"
