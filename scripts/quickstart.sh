#!/usr/bin/env bash
# Usage: scripts/quickstart.sh [--steps N] [--run-name NAME] [--model M] [--dataset arithmetic|gsm8k] [--dataset-path FILE]
#                              [--seed S] [--api-port P] [--vllm-port P] [--help]
#
# Sets up if needed, then trains a language model by GRPO through every service of Atropos, each a process of its own on this machine:
# batching API, vLLM server, GSM8K environment, trainer. Without flags: SmolLM2-135M-Instruct learns sums and products, on two CPU cores.
#
#   --steps N            training steps (default 15)
#   --run-name NAME      all output goes to runs/NAME/ (default: quickstart-DATE-TIME)
#   --model M            Hugging Face id or local folder (default: SmolLM2-135M-Instruct out of a package, no hub needed)
#   --dataset D          arithmetic: generated sums and products; gsm8k: the real one, from the hub (default arithmetic)
#   --dataset-path FILE  jsonl file with question and answer, or a folder with train.jsonl and test.jsonl
#   --seed S             seed of sampling, problems and trainer (default 1)
#   --api-port, --vllm-port  default 8000 and 9001, or the next free ones
#
# Ctrl-C, or any service's death, ends all of them within 10 s.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=scripts/lib/services.sh
source "$root/scripts/lib/services.sh"

python=$root/.venv/bin/python
flags=(--steps --run-name --model --dataset --dataset-path --seed --api-port --vllm-port --help)
steps=15 run_name='' model='' dataset='' dataset_path='' seed=1 api_port='' vllm_port=''

parse_flags() {
  local flag value
  while (($#)); do
    flag=$1
    if [[ $flag == -h || $flag == --help ]]; then print_help "${BASH_SOURCE[0]}" && exit 0; fi
    [[ " ${flags[*]} " == *" ${flag%%=*} "* ]] || unknown_flag "$flag" "${flags[@]}"
    if [[ $flag == *=* ]]; then
      value=${flag#*=} flag=${flag%%=*} && shift
    else
      (($# > 1)) || usage_error "$flag expects a value"
      value=$2 && shift 2
    fi
    case $flag in
      --steps) positive_integer "$flag" "$value" && steps=$value ;;
      --seed) positive_integer "$flag" "$value" && seed=$value ;;
      --api-port) port_number "$flag" "$value" && api_port=$value ;;
      --vllm-port) port_number "$flag" "$value" && vllm_port=$value ;;
      --run-name) run_name=$value ;;
      --model) model=$value ;;
      --dataset) dataset=$value ;;
      --dataset-path) dataset_path=$value ;;
    esac
  done
}

check_flags() {
  [[ -z $dataset || -z $dataset_path ]] || usage_error "--dataset $dataset and --dataset-path $dataset_path exclude each other"
  if [[ -n $dataset_path ]]; then
    [[ -e $dataset_path ]] || usage_error "--dataset-path $dataset_path does not exist"
    dataset_path=$(realpath "$dataset_path")
  fi
  [[ ${dataset:=arithmetic} =~ ^(arithmetic|gsm8k)$ ]] || usage_error "--dataset expects arithmetic or gsm8k, got '$dataset'; local files go to --dataset-path"
  if [[ $model == [./~]* ]]; then
    [[ -f ${model/#\~/$HOME}/config.json ]] || usage_error "--model $model has no config.json; give a Hugging Face id or a model's folder"
    model=$(realpath "${model/#\~/$HOME}")
  fi
  : "${run_name:=quickstart-$(date +%Y%m%d-%H%M%S)}"
  [[ $run_name =~ ^[A-Za-z0-9._-]+$ && $run_name != .* ]] || usage_error "--run-name takes letters, digits, '.', '_' and '-', got '$run_name'"
  [[ ! -e $root/runs/$run_name ]] || usage_error "runs/$run_name exists; choose another --run-name, or remove that folder"
}

# choose_port FLAG GIVEN DEFAULT OTHER: the port, a free one in place of a taken default. A taken port that was asked for is an error.
choose_port() {
  local port
  if [[ -n $2 ]]; then
    require_free_port "$1" "$2"
    port=$2
  else
    port=$(free_port "$3" "$4")
    if [[ $port != "$3" ]]; then say "Port $3 is taken by $(port_holder "$3"): using $port" >&2; fi
  fi
  echo "$port"
}

# choose_settings: flags that differ between the built-in task, which two cores can do, and any other, and which GPU is whose.
choose_settings() {
  vllm_gpu=() trainer_gpu=()
  vllm_flags=(--model "$model" --host 127.0.0.1 --port "$vllm_port" --seed "$seed")
  env_flags=(--env.group_size 8 --env.max_batches_offpolicy 0 --env.steps_per_eval 5)
  trainer_flags=(--batch-size 8 --gradient-accumulation-steps 8 --adam-betas "0.9,0.95")
  if [[ -n $dataset_path ]]; then env_flags+=(--env.dataset_path "$dataset_path"); else env_flags+=(--env.dataset "$dataset"); fi
  if [[ -z $dataset_path && $dataset == arithmetic ]]; then
    vllm_flags+=(--max-model-len 256)
    env_flags+=(--env.max_new_tokens 24)
    trainer_flags+=(--lr 2e-5 --seq-len 256)
  else
    vllm_flags+=(--max-model-len 1024)
    env_flags+=(--env.max_new_tokens 400)
    trainer_flags+=(--lr 5e-6 --seq-len 1024)
  fi
  if ((gpus == 0)); then
    vllm_flags+=(--dtype float32 --block-size 32 --max-num-seqs 64)
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB
    export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # vLLM and trainer take turns on the same cores: who waits must not spin
  else
    vllm_flags+=(--dtype bfloat16 --max-num-seqs 256)
    if ((gpus == 1)); then
      vllm_flags+=(--gpu-memory-utilization 0.4) # the trainer shares the GPU, which NCCL refuses to two ranks
      trainer_flags+=(--bridge-backend gloo)
    else
      vllm_gpu=(env CUDA_VISIBLE_DEVICES=0) trainer_gpu=(env CUDA_VISIBLE_DEVICES=1)
    fi
  fi
}

# keep_configs: each program's resolved configuration beside its logs. A wrong one ends the run here.
keep_configs() {
  "$python" -m atroposlib.cli.run_api "${api_flags[@]}" --dry-run >"$run_dir/api.yaml"
  "$python" -c 'from atroposlib.config import load_config; from example_trainer.config import TrainerConfig; load_config(TrainerConfig, prog="grpo")' \
    "${trainer_flags[@]}" --dry-run >"$run_dir/trainer.yaml"
  "$python" environments/gsm8k_server.py serve "${env_flags[@]}" --dry-run >"$run_dir/env.yaml"
  printf -- '- "%s"\n' "${vllm_flags[@]}" >"$run_dir/vllm.yaml"
}

main() {
  parse_flags "$@"
  check_flags
  "$root/scripts/setup.sh"
  cd "$root"
  gpus=$(gpu_count)
  api_port=$(choose_port --api-port "$api_port" 8000 '')
  vllm_port=$(choose_port --vllm-port "$vllm_port" 9001 "$api_port")
  # Nothing is asked of the hub for a local model and local problems.
  if [[ -z $model ]]; then model=$("$python" -m example_trainer.quickstart_model); fi
  if [[ $model == /* && ( -n $dataset_path || $dataset == arithmetic ) ]]; then export HF_HUB_OFFLINE=1; fi

  own_run "$root/runs/$run_name"
  choose_settings
  local api=http://127.0.0.1:$api_port vllm=http://127.0.0.1:$vllm_port
  api_flags=(--port "$api_port")
  env_flags+=(--env.rollout_server_url "$api" --env.tokenizer_name default --env.eval_at_start true --env.ensure_scores_are_not_same false
    --env.total_steps -1 --env.seed "$seed" --env.use_wandb false --env.evaluations_path "$run_dir/evaluations.jsonl"
    --env.data_path_to_save_groups "$run_dir/samples.jsonl"
    --openai.model_name default --openai.base_url "$vllm/v1" --openai.server_type vllm)
  trainer_flags+=(--model-name "$model" --training-steps "$steps" --seed "$seed" --atropos-url "$api" --vllm-host 127.0.0.1
    --vllm-port "$vllm_port" --weight-bridge-mode shared_vllm --use-shared-memory --checkpoint-interval 0
    --save-path "$run_dir/checkpoints" --log-dir "$run_dir" --metrics-path "$run_dir/metrics.jsonl")
  say "Training $model for $steps steps on ${dataset_path:-$dataset}; everything goes to runs/$run_name/"
  keep_configs

  start_service api "$run_dir/api.log" "$python" -u -m atroposlib.cli.run_api "${api_flags[@]}"
  start_service vllm "$run_dir/vllm.log" env VLLM_ENABLE_SHARED_WEIGHTS=1 VLLM_NO_USAGE_STATS=1 \
    "VLLM_BRIDGE_CONFIG_PATH=$run_dir/vllm_bridge_config.json" "${vllm_gpu[@]}" "$python" -u example_trainer/vllm_api_server.py "${vllm_flags[@]}"
  start_service trainer "$run_dir/trainer.log" "${trainer_gpu[@]}" "$python" -u example_trainer/grpo.py "${trainer_flags[@]}"
  start_service env "$run_dir/env.log" "$python" -u environments/gsm8k_server.py serve "${env_flags[@]}"
  await_http api "$api/health" 60
  await_http vllm "$vllm/health" 900
  follow env "$run_dir/env.log" 'Held-out accuracy'
  follow trainer "$run_dir/trainer.log" '(Step [0-9]+/|Trained model: )'
  monitor 300 trainer env
  "$python" -m example_trainer.plot "$run_dir/metrics.jsonl" --evaluations "$run_dir/evaluations.jsonl" --out "$run_dir/reward.png" --title "$run_name"
  stop_services
  "$python" scripts/lib/summary.py "$run_dir" --seconds "$SECONDS"
}

main "$@"
