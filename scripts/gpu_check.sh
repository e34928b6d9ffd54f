#!/usr/bin/env bash
# Usage: scripts/gpu_check.sh [--only WORD] [--list] [--help]
#
# Runs every check of Atropos that needs a GPU and prints a table: each weight bridge in a short training run whose
# parity probe compares vLLM with the trainer after the first syncs, and bit-exactness: batch m against n, prefill
# against decode, trainer against both, then a strict training run. Beside each run stands its last step's line: reward,
# tokens per second, stall. Exit status 0 if every check that fits this machine passes, 1 if one fails, 2 without a GPU.
# What needs more GPUs than there are is named, not run.
#
#   --only WORD     the checks with this word in their name
#   --list          names, GPUs and commands; runs nothing
#   ATROPOS_PYTHON  a Python with torch and vllm to use as it is, instead of setting up .venv
#
# Output goes to runs/gpu-check-DATE-TIME/, a log a check, and the table to table.md there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
source "$root/scripts/lib/common.sh"

deadline_s=1200 # of each check
only='' list=false stamp=''
rows=()

# checks: a line each, `GPUs | name | command`. A training run takes the quickstart's task and model; 3 steps are 4
# policy versions.
checks() {
  local task="--dataset arithmetic --steps 3 --run-name $stamp"
  cat <<LIST
1 | doctor | scripts/bridge_doctor.sh --mode single_copy --model $model
1 | single copy by CUDA IPC | scripts/run_gsm8k_single_copy.sh $task-single-copy
1 | LoRA adapters | scripts/run_gsm8k_lora.sh $task-lora
1 | LoRA adapters, restart | scripts/run_gsm8k_lora_restart.sh $task-lora-restart
1 | restart | scripts/run_gsm8k_restart.sh $task-restart
1 | broadcast over Gloo, one GPU | env CUDA_VISIBLE_DEVICES=0 scripts/run_gsm8k_broadcast.sh $task-gloo
1 | bit-exact, trainer against sampler | $python -m pytest -q tests/integration/test_bit_exact.py -k bits
1 | bit-exact training | env CUDA_VISIBLE_DEVICES=0 scripts/run_gsm8k_broadcast.sh $task-exact --batch-invariant
2 | broadcast over NCCL | scripts/run_gsm8k_broadcast.sh $task-nccl
LIST
}

parse_flags() {
  while (($#)); do
    case $1 in
      -h | --help) print_help "$0" && exit 0 ;;
      --list) list=true ;;
      --only)
        (($# > 1)) || usage_error "--only expects a word"
        only=$2 && shift
        ;;
      *) unknown_flag "$1" --only --list --help ;;
    esac
    shift
  done
}

# check GPUS NAME COMMAND...: one row of the table.
check() {
  local needs=$1 name=$2 started=$SECONDS log result=passed
  shift 2
  if ((needs > gpus)); then
    rows+=("| $name | not run: needs $needs GPUs | | |")
    return
  fi
  local last_step log=$run_dir/${name//[^A-Za-z0-9]/-}.log
  say "$name (at most $deadline_s s, log $log): $*"
  timeout --kill-after=20 "$deadline_s" "$@" >"$log" 2>&1 </dev/null || result="FAILED, status $?"
  say "    $result after $((SECONDS - started)) s"
  last_step=$(grep -oE 'Step [0-9]+/.*' "$log" | tail -n 1 | tr '|' ',' || true)
  rows+=("| $name | $result | $((SECONDS - started)) s | $last_step |")
  if [[ $result != passed ]]; then failed=true && tail -n 5 "$log" | sed 's/^/    /'; fi
}

main() {
  local needs name command failed=false gpus python model stamp
  parse_flags "$@"
  cd "$root"
  python=${ATROPOS_PYTHON:-$root/.venv/bin/python} model=MODEL stamp=gpu-check-$(date +%Y%m%d-%H%M%S)
  if [[ $list == true ]]; then checks && return; fi
  gpus=$(gpu_count)
  if ((gpus == 0)); then
    echo "gpu_check.sh: no GPU on this machine (nvidia-smi lists none): nothing was checked" >&2
    exit 2
  fi
  use_python
  model=$("$python" -m example_trainer.quickstart_model)
  run_dir=$root/runs/$stamp
  mkdir -p "$run_dir"
  while IFS='|' read -r needs name command; do
    read -r name <<<"$name"
    [[ $name == *"$only"* ]] || continue
    read -ra words <<<"$command"
    check "$needs" "$name" "${words[@]}" </dev/null
  done < <(checks)
  {
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    printf '\nCommand: `scripts/gpu_check.sh%s`\n' "${only:+ --only $only}"
    "$python" -c 'import torch, vllm_patching.version as v; print(f"PyTorch {torch.__version__}, vLLM {v.VERSION}\n")'
    printf '| check | result | took | last step |\n|---|---|---|---|\n'
    printf '%s\n' "${rows[@]}"
  } | tee "$run_dir/table.md"
  [[ $failed == false ]]
}

main "$@"
