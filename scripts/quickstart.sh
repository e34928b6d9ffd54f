#!/usr/bin/env bash
# Usage: scripts/quickstart.sh [MODEL] [--steps N] [--run-name NAME] [--dataset arithmetic|gsm8k] [--dataset-path FILE]
#                              [--seed S] [--api-port P] [--vllm-port P] [--help]
#
# Sets up if needed, then trains a language model by GRPO through every service of Atropos, each a process of its own on
# this machine: batching API, vLLM server, GSM8K environment, trainer. Without flags: SmolLM2-135M-Instruct learns sums
# and products, on two CPU cores. New weights are broadcast into the running vLLM; scripts/run_gsm8k_*.sh train the same
# task by every other weight bridge.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=scripts/lib/services.sh
source "$root/scripts/lib/services.sh"
# shellcheck source=scripts/lib/training.sh
source "$root/scripts/lib/training.sh"

run_prefix=quickstart
default_dataset=arithmetic
default_steps=20
default_gpu_model=''
problems_flags=(--lr 5e-6)
checkpoint_interval=0
show_bridge=false
bridge_flags=(--weight-bridge-mode shared_vllm --use-shared-memory)

train "$@"
