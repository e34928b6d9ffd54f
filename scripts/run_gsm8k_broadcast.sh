#!/usr/bin/env bash
# Usage: scripts/run_gsm8k_broadcast.sh [MODEL] [--steps N] [--api-port P] [--vllm-port P] [--help]
#
# GRPO on GSM8K with weights broadcast from the trainer to vLLM: batching API, GSM8K environment, vLLM server, trainer, each awaited by its
# health before the next needs it. MODEL is a Hugging Face id or a local folder.
#
#   with 3 GPUs or more   vLLM on GPUs 0 and 1 (tensor parallel), trainer on GPU 2
#   with 2 GPUs, with 1   vLLM on GPU 0, trainer on GPU 1; both on the one
#   without a GPU         both on the CPU, in float32
#
#   MODEL        default Qwen/Qwen2.5-14B-Instruct, without a GPU the quickstart's SmolLM2-135M-Instruct
#   --steps N    training steps (default 100)
#   --api-port, --vllm-port   default 8000 and 9001; a taken one is an error that says who holds it
#
# Logs, metrics and checkpoints go to runs/gsm8k-broadcast-DATE-TIME/. Ctrl-C, or any service's death, ends all of them within 10 s.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=scripts/lib/services.sh
source "$root/scripts/lib/services.sh"

python=$root/.venv/bin/python
model='' steps=100 api_port=8000 vllm_port=9001

parse_flags() {
  while (($#)); do
    case $1 in
      -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
      --steps | --api-port | --vllm-port)
        (($# > 1)) || usage_error "$1 expects a value"
        case $1 in
          --steps) positive_integer "$1" "$2" && steps=$2 ;;
          --api-port) port_number "$1" "$2" && api_port=$2 ;;
          --vllm-port) port_number "$1" "$2" && vllm_port=$2 ;;
        esac
        shift
        ;;
      -*) unknown_flag "$1" --steps --api-port --vllm-port --help ;;
      *)
        [[ -z $model ]] || usage_error "one MODEL only, got '$model' and '$1'"
        model=$1
        ;;
    esac
    shift
  done
}

# choose_devices: which GPUs are whose, and what fits them.
choose_devices() {
  vllm_gpu=() trainer_gpu=() bridge_flags=()
  case $(gpu_count) in
    0)
      vllm_flags=(--dtype float32 --max-model-len 1024 --max-num-seqs 64)
      export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB
      export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # vLLM and trainer share the cores: who waits must not spin
      if [[ -z $model ]]; then model=$("$python" -m example_trainer.quickstart_model); fi
      ;;
    1)
      vllm_flags=(--dtype bfloat16 --gpu-memory-utilization 0.4)
      bridge_flags=(--bridge-backend gloo) # NCCL refuses two ranks on one GPU
      ;;
    2)
      vllm_flags=(--dtype bfloat16)
      vllm_gpu=(env CUDA_VISIBLE_DEVICES=0) trainer_gpu=(env CUDA_VISIBLE_DEVICES=1)
      ;;
    *)
      vllm_flags=(--dtype bfloat16 --tensor-parallel-size 2)
      vllm_gpu=(env "CUDA_VISIBLE_DEVICES=0,1") trainer_gpu=(env CUDA_VISIBLE_DEVICES=2)
      ;;
  esac
  : "${model:=Qwen/Qwen2.5-14B-Instruct}"
}

main() {
  parse_flags "$@"
  "$root/scripts/setup.sh"
  cd "$root"
  require_free_port --api-port "$api_port"
  require_free_port --vllm-port "$vllm_port"
  choose_devices
  own_run "$root/runs/gsm8k-broadcast-$(date +%Y%m%d-%H%M%S)"
  local api=http://127.0.0.1:$api_port vllm=http://127.0.0.1:$vllm_port
  export VLLM_ENABLE_SHARED_WEIGHTS=1 NUM_INFERENCE_NODES=0 MASTER_ADDR=localhost MASTER_PORT=${MASTER_PORT:-29500}
  export VLLM_BRIDGE_CONFIG_PATH=$run_dir/vllm_bridge_config.json

  start_service api "$run_dir/api.log" "$python" -u -m atroposlib.cli.run_api --port "$api_port"
  await_http api "$api/health" 60
  start_service env "$run_dir/gsm8k.log" "$python" -u environments/gsm8k_server.py serve --env.rollout_server_url "$api" \
    --env.evaluations_path "$run_dir/evaluations.jsonl" --env.data_path_to_save_groups "$run_dir/samples.jsonl" \
    --openai.model_name default --openai.base_url "$vllm/v1" --openai.server_type vllm
  start_service vllm "$run_dir/vllm.log" "${vllm_gpu[@]}" "$python" -u example_trainer/vllm_api_server.py --model "$model" \
    --port "$vllm_port" "${vllm_flags[@]}"
  await_http vllm "$vllm/health" 1800
  grep -E 'thread|updater|Exported|Shared memory' "$run_dir/vllm.log" || die "vLLM set up no shared memory, see $run_dir/vllm.log"
  start_service trainer "$run_dir/trainer.log" "${trainer_gpu[@]}" "$python" -u example_trainer/grpo.py --model-name "$model" \
    --weight-bridge-mode shared_vllm --vllm-port "$vllm_port" --atropos-url "$api" --lr 1e-6 --batch-size 4 \
    --training-steps "$steps" --use-shared-memory --save-path "$run_dir/checkpoints" --log-dir "$run_dir" "${bridge_flags[@]}"
  follow trainer "$run_dir/trainer.log" '(\[Bridge\] ✓|\[Bridge\] Mapped|Step [0-9]+/|Trained model: )'
  follow env "$run_dir/gsm8k.log" 'Held-out accuracy'
  monitor 600 trainer env
  say "Trained; logs, metrics.jsonl and checkpoints/final_model are in $run_dir"
}

main "$@"
