#!/usr/bin/env bash
# Train a policy with VERL's GRPO: check everything first, then run, log, and continue after an interruption.
#
#   bash Policy_Optimization/grpo_train.sh --dry_run --model Qwen/Qwen2.5-1.5B-Instruct --group_size 32
#   MODEL=/models/qwen GROUP_SIZE=64 bash Policy_Optimization/grpo_train.sh --estimator paper --gpus_per_node 4
#   bash Policy_Optimization/grpo_train.sh --env verl --run_dir outputs/train/a -- trainer.total_training_steps=100
#
# Settings are flags or environment variables (--help lists them); what follows -- goes to VERL unchanged.
# --env takes a conda environment's name or a virtual environment's folder; without it the current python runs.
# Everything is written under --run_dir. The same command continues from its last checkpoint; a finished run is
# not started again. Exit code: 0, 2 for a wrong setting (one line says which), else VERL's. One GSM8K run of a
# 1.5B model is meant for a node of 8 GPUs; --dry_run works on a laptop.
set -euo pipefail

# The settings by the names of the paper's script: edit them here, or set them in the environment. A flag wins.
# MODEL=Qwen/Qwen2.5-1.5B-Instruct
# DATA_DIR=outputs/parquet/gsm8k
# TRAIN_FILE=$DATA_DIR/train.parquet
# VAL_FILE=$DATA_DIR/val.parquet
# GROUP_SIZE=32
# GPUS=8                        # how many, or which: 0,1,2,3
# GPU_UTIL=0.5
# NNODES=1
# CONDA_ROOT=$HOME/miniconda3   # with ENV_NAME: the environment is CONDA_ROOT/envs/ENV_NAME
# ENV_NAME=verl
# PYTHON_BIN=python
# PROJECT_NAME=group_size
# EXPERIMENT_NAME=my_run
# RUN_TAG=first                 # behind the name that the run gets without EXPERIMENT_NAME
# WANDB_MODE=offline
for name in MODEL DATA_DIR TRAIN_FILE VAL_FILE GROUP_SIZE GPUS GPU_UTIL NNODES CUDA_VISIBLE_DEVICES CONDA_ROOT ENV_NAME \
  PYTHON_BIN PROJECT_NAME EXPERIMENT_NAME RUN_TAG WANDB_MODE BASE REPO_DIR; do
  [[ -z ${!name:-} ]] || export "${name?}"
done
if [[ ${GPUS:-} == *,* && -z ${CUDA_VISIBLE_DEVICES:-} ]]; then export CUDA_VISIBLE_DEVICES="$GPUS"; fi

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

# The value of --env, else of the variables PYTHON_BIN (a path) or ENV_NAME; flags behind -- are VERL's.
chosen_environment() {
  local chosen="${ENV_NAME:-}"
  if [[ ${PYTHON_BIN:-} == */* ]]; then chosen="$PYTHON_BIN"; fi
  while (($#)) && [[ $1 != -- ]]; do
    case $1 in
      --env) chosen="${2:-}" ;;
      --env=*) chosen="${1#--env=}" ;;
    esac
    shift
  done
  printf '%s' "$chosen"
}

# The python of an environment: a folder with bin/python, a conda environment by name, a python itself, or the current one.
find_python() {
  local chosen="$1" prefix
  if [[ -z $chosen && -n ${PYTHON_BIN:-} ]]; then
    command -v "$PYTHON_BIN" || fail "PYTHON_BIN=$PYTHON_BIN: there is no such program"
  elif [[ -z $chosen ]]; then
    command -v python || command -v python3 || fail "there is no python here; give --env"
  elif [[ $chosen == "${PYTHON_BIN:-}" ]]; then
    [[ -x $chosen && ! -d $chosen ]] || fail "PYTHON_BIN=$chosen: there is no such program"
    printf '%s\n' "$chosen"
  elif [[ -x $chosen/bin/python ]]; then
    printf '%s\n' "$(cd -- "$chosen" && pwd)/bin/python"
  elif [[ -d $chosen ]]; then
    fail "--env $chosen: holds no bin/python, so it is no virtual environment"
  elif [[ -n ${CONDA_ROOT:-} ]]; then
    prefix="$CONDA_ROOT/envs/$chosen"
    if [[ $chosen == base ]]; then prefix="$CONDA_ROOT"; fi
    [[ -x $prefix/bin/python ]] || fail "ENV_NAME=$chosen, CONDA_ROOT=$CONDA_ROOT: there is no $prefix/bin/python"
    printf '%s\n' "$prefix/bin/python"
  elif command -v conda >/dev/null; then
    prefix="$(conda run -n "$chosen" python -c 'import sys; print(sys.prefix)' 2>/dev/null)" ||
      fail "--env $chosen: no folder and no conda environment of this name"
    printf '%s\n' "$prefix/bin/python"
  else
    fail "--env $chosen: no folder of this name, and conda is not installed"
  fi
}

python="$(find_python "$(chosen_environment "$@")")" || exit 2

plan="$(mktemp -d)"
trap 'rm -rf -- "$plan"' EXIT
"$python" "$here/launch.py" --plan "$plan" "$@" || exit $?
[[ -f $plan/command ]] || exit 0 # a dry run, --help, or a run that is finished

mapfile -d '' -t command <"$plan/command"
mapfile -d '' -t environment <"$plan/environment"
mapfile -d '' -t paths <"$plan/paths"
run_dir="${paths[0]}" log="${paths[1]}"
for variable in "${environment[@]}"; do
  export "${variable?}"
done
export PYTHONUNBUFFERED=1 HYDRA_FULL_ERROR="${HYDRA_FULL_ERROR:-1}"
export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
if [[ -z ${RAY_ADDRESS:-} ]]; then
  export RAY_AUTH_MODE="${RAY_AUTH_MODE:-disabled}" # else Ray writes a token into the home folder
fi

exec 9>"$run_dir/.lock"
flock -n 9 || fail "$run_dir: another launcher is training in this folder; wait for it or give another --run_dir"

# In the background, so that a signal to this script reaches VERL at once; tee ends when VERL's output does.
exec {console}> >(exec tee -a -- "$log" 9>&-)
tee_pid=$!
"$python" "${command[@]}" >&"$console" 2>&1 9>&- &
child=$!
stopped=0
trap 'stopped=130; kill -TERM "$child" 2>/dev/null || true' INT
trap 'stopped=143; kill -TERM "$child" 2>/dev/null || true' TERM
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do
  code=0
  wait "$child" || code=$?
done
exec {console}>&-
for _ in {1..50}; do
  kill -0 "$tee_pid" 2>/dev/null || break
  sleep 0.1
done

if ((stopped)); then
  echo "stopped; the same command continues from the last checkpoint in $run_dir/checkpoints" >&2
  exit "$stopped"
fi
if ((code)); then
  echo "error: training ended with code $code; its output is in $log; the same command continues" >&2
  exit "$code"
fi
date -u +%Y-%m-%dT%H:%M:%SZ >"$run_dir/finished"
echo "finished; everything is in $run_dir"
if [[ ${WANDB_MODE:-} == offline ]]; then
  printf 'W&B was offline; with a key: wandb sync %q/wandb/offline-run-*\n' "$run_dir"
fi
