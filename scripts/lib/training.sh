# shellcheck shell=bash
# One training run through every service of Atropos: flags, settings of the task, GPUs, start, watch, end. Sourced after
# common.sh and services.sh by quickstart.sh and by each run_gsm8k_MODE.sh, which change the variables below where they
# differ and call `train "$@"`.
#
#    1 flags   2 set-up   3 ports   4 settings   5 the run's folder, with every service's configuration
#    6 API, vLLM, trainer, environment: started at once, each waits for whom it needs   7 wait for API and vLLM
#    8 watch   9 plot, end, sum up
#
# Where the trainer owns vLLM (vllm_owner=trainer), it starts and ends it, and 6 and 7 leave it out.

run_prefix=''                                # output goes to runs/PREFIX-DATE-TIME
default_dataset=auto                         # the hub's GSM8K, or the built-in problems where the hub cannot be reached
default_steps=100                            # 20 on arithmetic
# 23 GiB on the trainer's GPU (docs/gpus.md); without a GPU, and for arithmetic, the quickstart's model
default_gpu_model=Qwen/Qwen2.5-1.5B-Instruct
checkpoint_interval=20
layout=separate                              # vLLM and trainer on GPUs of their own; same: both on the same ones
vllm_owner=launcher                          # who starts and ends vLLM: launcher, or trainer
bridge_flags=()                              # the mode: flags of the trainer,
server_flags=()                              # and of vLLM
arithmetic_flags=(--lr 2e-5)                 # the trainer's, for the built-in task,
problems_flags=(--lr 1e-6)                   # and for any other
show_bridge=true                             # what the bridge says on both sides goes to the console too

known_flags=(--model --steps --dataset --dataset-path --run-name --seed --batch-invariant --dtype --api-port --vllm-port
  --help)
steps='' run_name='' model='' dataset='' dataset_path='' seed=1 dtype='' api_port='' vllm_port=''

show_help() {
  local steps_help="$default_steps; for --dataset arithmetic 20" dataset_help=$default_dataset
  local model_help="the quickstart's SmolLM2-135M-Instruct, which needs no hub"
  if [[ -n $default_gpu_model ]]; then
    model_help="$default_gpu_model; without a GPU, or for arithmetic, $model_help"
  fi
  if ((default_steps == 20)); then steps_help=20; fi
  if [[ $default_dataset == auto ]]; then dataset_help="gsm8k, or arithmetic where the hub cannot be reached"; fi
  print_help "$0"
  cat <<HELP

  --model M, or MODEL      Hugging Face id or local folder (default: $model_help)
  --steps N                training steps (default: $steps_help)
  --dataset D              arithmetic: generated sums and products; gsm8k: the real one, from the hub
                           (default: $dataset_help)
  --dataset-path FILE      jsonl file with question and answer, or a folder with train.jsonl and test.jsonl
  --run-name NAME          all output goes to runs/NAME/ (default: $run_prefix-DATE-TIME)
  --seed S                 seed of sampling, problems and trainer (default 1)
  --batch-invariant        trainer and vLLM compute the same bits; the first differing token ends the run
                           (docs/bit-exactness.md)
  --dtype D                what vLLM computes in, and with --batch-invariant the trainer: float32 or bfloat16
                           (default: float32, on a GPU bfloat16)
  --api-port, --vllm-port  default 8000 and 9001, or the next free ones

Ctrl-C, or any service's death, ends all of them within 10 s.
HELP
}

parse_flags() {
  local flag value
  while (($#)); do
    flag=$1
    if [[ $flag == -h || $flag == --help ]]; then show_help; exit; fi
    if [[ $flag != -* ]]; then
      [[ -z $model ]] || usage_error "one MODEL only, got '$model' and '$flag'"
      model=$flag && shift && continue
    fi
    if [[ $flag == --batch-invariant ]]; then
      server_flags+=(--batch-invariant) bridge_flags+=(--batch-invariant --bit-exact strict)
      shift && continue
    fi
    [[ " ${known_flags[*]} " == *" ${flag%%=*} "* ]] || unknown_flag "$flag" "${known_flags[@]}"
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
      --dtype)
        [[ $value =~ ^(float32|bfloat16)$ ]] || usage_error "--dtype expects float32 or bfloat16, got '$value'"
        dtype=$value
        ;;
      --run-name) run_name=$value ;;
      --model) model=$value ;;
      --dataset) dataset=$value ;;
      --dataset-path) dataset_path=$value ;;
    esac
  done
}

check_flags() {
  [[ -z $dataset || -z $dataset_path ]] ||
    usage_error "--dataset $dataset and --dataset-path $dataset_path exclude each other"
  if [[ -n $dataset_path ]]; then
    [[ -e $dataset_path ]] || usage_error "--dataset-path $dataset_path does not exist"
    dataset_path=$(realpath "$dataset_path")
  fi
  [[ ${dataset:-gsm8k} =~ ^(arithmetic|gsm8k)$ ]] ||
    usage_error "--dataset expects arithmetic or gsm8k, got '$dataset'; local files go to --dataset-path"
  : "${dataset:=$default_dataset}"
  if [[ -n $dataset_path ]]; then dataset=''; fi
  if [[ $model == [./~]* ]]; then
    [[ -f ${model/#\~/$HOME}/config.json ]] ||
      usage_error "--model $model has no config.json; give a Hugging Face id or a model's folder"
    model=$(realpath "${model/#\~/$HOME}")
  fi
  if [[ -z $steps && $dataset == arithmetic ]]; then steps=20; fi
  : "${steps:=$default_steps}" "${run_name:=$run_prefix-$(date +%Y%m%d-%H%M%S)}"
  [[ $run_name =~ ^[A-Za-z0-9._-]+$ && $run_name != .* ]] ||
    usage_error "--run-name takes letters, digits, '.', '_' and '-', got '$run_name'"
  [[ ! -e $root/runs/$run_name ]] ||
    usage_error "runs/$run_name exists; choose another --run-name, or remove that folder"
}

# choose_port FLAG GIVEN DEFAULT OTHER: the port, a free one in place of a taken default. A taken port that was asked
# for is an error.
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

choose_model() {
  if [[ -z $model && $gpus != 0 && $dataset != arithmetic ]]; then model=$default_gpu_model; fi
  if [[ -z $model ]]; then model=$("$python" -m example_trainer.quickstart_model); fi
  # Nothing is asked of the hub for a local model and local problems.
  if [[ $model == /* && ( -n $dataset_path || $dataset == arithmetic ) ]]; then export HF_HUB_OFFLINE=1; fi
}

# task_settings: what differs between the built-in task, which two cores can do, and any other.
task_settings() {
  env_flags=(--env.group_size 8 --env.max_batches_offpolicy 0 --env.steps_per_eval 5)
  trainer_flags=(--batch-size 8 --gradient-accumulation-steps 8 --adam-betas "0.9,0.95")
  env_flags+=("--env.dataset${dataset_path:+_path}" "${dataset_path:-$dataset}")
  if [[ $dataset == arithmetic ]]; then
    vllm_flags+=(--max-model-len 256)
    env_flags+=(--env.max_new_tokens 24)
    # late steps, with few groups left to learn from, undo what was learnt unless they are small
    trainer_flags+=(--seq-len 256 --lr-decay-steps $((steps / 3)) "${arithmetic_flags[@]}")
  else
    vllm_flags+=(--max-model-len 1024)
    env_flags+=(--env.max_new_tokens 400)
    trainer_flags+=(--seq-len 1024 "${problems_flags[@]}")
  fi
}

# device_settings: which of the visible GPUs is whose, and what fits it. The arithmetic task's model is too small for
# tensor parallelism.
device_settings() {
  local ranks=1 trainer_at list
  local -a visible
  vllm_gpus='' trainer_gpus=''
  if ((gpus == 0)); then
    vllm_flags+=(--dtype "${dtype:-float32}" --block-size 32 --max-num-seqs 64)
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB
    return
  fi
  list=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}
  IFS=, read -ra visible <<<"$list"
  vllm_flags+=(--dtype "${dtype:-bfloat16}" --max-num-seqs 256)
  if ((gpus > 2)) && [[ $dataset != arithmetic ]]; then
    ranks=2
    vllm_flags+=(--tensor-parallel-size 2)
  fi
  vllm_gpus=$(IFS=, && echo "${visible[*]:0:ranks}")
  if ((gpus == 1)) || [[ $layout == same ]]; then
    vllm_flags+=(--gpu-memory-utilization 0.4) # the trainer needs the rest
    trainer_gpus=$vllm_gpus
    if [[ " ${bridge_flags[*]} " == *" --use-shared-memory "* ]]; then
      trainer_flags+=(--bridge-backend gloo) # NCCL refuses two ranks on one GPU
    fi
  else
    trainer_gpus=${visible[ranks]}
  fi
}

# service_settings: what ties the four services together; runs/NAME/ takes all that they write.
service_settings() {
  api=http://127.0.0.1:$api_port vllm=http://127.0.0.1:$vllm_port
  api_flags=(--port "$api_port" --journal "$run_dir/rollouts.db")
  vllm_flags+=(--seed "$seed" "${server_flags[@]}")
  if [[ $vllm_owner == launcher ]]; then
    vllm_flags+=(--model "$model" --host 127.0.0.1 --port "$vllm_port")
  else
    trainer_flags+=("--vllm-flags=${vllm_flags[*]}")
    if [[ $vllm_gpus != "$trainer_gpus" ]]; then trainer_flags+=(--vllm-gpu "$vllm_gpus"); fi
  fi
  env_flags+=(--env.rollout_server_url "$api" --env.tokenizer_name default --env.eval_at_start true
    --env.ensure_scores_are_not_same false --env.total_steps -1 --env.seed "$seed" --env.use_wandb false
    --env.evaluations_path "$run_dir/evaluations.jsonl" --env.data_path_to_save_groups "$run_dir/samples.jsonl"
    --openai.model_name default --openai.base_url "$vllm/v1" --openai.server_type vllm)
  trainer_flags+=(--model-name "$model" --training-steps "$steps" --seed "$seed" --atropos-url "$api"
    --vllm-host 127.0.0.1 --vllm-port "$vllm_port" --vllm-start-timeout 1800
    --checkpoint-interval "$checkpoint_interval" --save-path "$run_dir/checkpoints" --log-dir "$run_dir"
    --metrics-path "$run_dir/metrics.jsonl" "${bridge_flags[@]}")
  export VLLM_ENABLE_SHARED_WEIGHTS=1 VLLM_NO_USAGE_STATS=1 NUM_INFERENCE_NODES=0 MASTER_ADDR=${MASTER_ADDR:-localhost}
  export VLLM_BRIDGE_CONFIG_PATH=$run_dir/vllm_bridge_config.json
}

# keep_configs: each program's resolved configuration beside its logs. A wrong one ends the run here.
keep_configs() {
  "$python" -m atroposlib.cli.run_api "${api_flags[@]}" --dry-run >"$run_dir/api.yaml"
  "$python" -c '
from atroposlib.config import load_config
from example_trainer.config import TrainerConfig
load_config(TrainerConfig, prog="grpo")' "${trainer_flags[@]}" --dry-run >"$run_dir/trainer.yaml"
  "$python" environments/gsm8k_server.py serve "${env_flags[@]}" --dry-run >"$run_dir/env.yaml"
  printf -- '- "%s"\n' "${vllm_flags[@]}" >"$run_dir/vllm.yaml"
}

# on_gpus GPUS COMMAND...: with those visible to it; the variable stays as it is where GPUS is empty.
on_gpus() {
  local gpus=$1
  shift
  if [[ -n $gpus ]]; then CUDA_VISIBLE_DEVICES=$gpus "$@"; else "$@"; fi
}

start_services() {
  start_service api "$run_dir/api.log" "$python" -u -m atroposlib.cli.run_api "${api_flags[@]}"
  if [[ $vllm_owner == launcher ]]; then
    on_gpus "$vllm_gpus" start_service vllm "$run_dir/vllm.log" \
      "$python" -u example_trainer/vllm_api_server.py "${vllm_flags[@]}"
  fi
  on_gpus "$trainer_gpus" start_service trainer "$run_dir/trainer.log" \
    "$python" -u example_trainer/grpo.py "${trainer_flags[@]}"
  start_service env "$run_dir/env.log" "$python" -u environments/gsm8k_server.py serve "${env_flags[@]}"
}

# watch_services: until trainer and environment have ended. Nothing from start_services on makes a command substitution
# (services.sh).
watch_services() {
  local trainer_lines='Step [0-9]+/|Trained model: |Bitwise identical: '
  await_http api "$api/health" 60
  if [[ $vllm_owner == launcher ]]; then await_http vllm "$vllm/health" 1800; fi
  if [[ $show_bridge == true ]]; then
    follow vllm "$run_dir/vllm.log" '(\[vLLM Patch\] ✓|Uvicorn running)'
    trainer_lines+='|\[Bridge\] (✓|Mapped|Started|Policy version)|Parity: '
  fi
  follow env "$run_dir/env.log" 'Held-out accuracy'
  follow trainer "$run_dir/trainer.log" "($trainer_lines)"
  monitor 300 trainer env
}

# train FLAGS...: the whole run.
train() {
  parse_flags "$@"
  check_flags
  use_python
  cd "$root"
  gpus=$(gpu_count)
  api_port=$(choose_port --api-port "$api_port" 8000 '')
  vllm_port=$(choose_port --vllm-port "$vllm_port" 9001 "$api_port")
  choose_model
  own_run "$root/runs/$run_name"
  vllm_flags=()
  task_settings
  device_settings
  service_settings
  say "Training $model for $steps steps on ${dataset_path:-$dataset}; everything goes to runs/$run_name/"
  keep_configs
  start_services
  watch_services
  "$python" -m example_trainer.plot "$run_dir/metrics.jsonl" --evaluations "$run_dir/evaluations.jsonl" \
    --out "$run_dir/reward.png" --title "$run_name"
  stop_services
  "$python" scripts/lib/summary.py "$run_dir" --seconds "$SECONDS"
}
