#!/usr/bin/env bash
# Usage: scripts/run_gsm8k_lora.sh [MODEL] [--steps N] [--dataset arithmetic|gsm8k] [--dataset-path FILE]
#                                  [--run-name NAME] [--seed S] [--api-port P] [--vllm-port P] [--help]
#
# GRPO on GSM8K with LoRA adapters (--weight-bridge-mode lora_only): the trainer trains an adapter of rank 16 and saves
# it after every step; vLLM loads it under a new name, unloads the previous one, and keeps its own weights.
#
#   with 3 GPUs or more   vLLM on GPUs 0 and 1 (tensor parallel; arithmetic on GPU 0 alone), trainer on the next
#   with 2 GPUs, with 1   vLLM on GPU 0, trainer on GPU 1; both on the one
#   without a GPU         both on the CPU, in float32
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=scripts/lib/services.sh
source "$root/scripts/lib/services.sh"
# shellcheck source=scripts/lib/training.sh
source "$root/scripts/lib/training.sh"

run_prefix=gsm8k-lora
bridge_flags=(--weight-bridge-mode lora_only --lora-r 16 --lora-alpha 32)
server_flags=(--enable-lora --max-lora-rank 16)
arithmetic_flags=(--lr 5e-4)
problems_flags=(--lr 1e-4)

train "$@"
