#!/usr/bin/env bash
# Usage: scripts/run_gsm8k_broadcast.sh [MODEL] [--steps N] [--dataset arithmetic|gsm8k] [--dataset-path FILE]
#                                       [--run-name NAME] [--seed S] [--api-port P] [--vllm-port P] [--help]
#
# GRPO on GSM8K with weights broadcast from the trainer to vLLM (--weight-bridge-mode shared_vllm --use-shared-memory):
# after every step the new weights travel into a staging buffer of each vLLM worker while generation goes on, and are
# then swapped in.
#
#   with 3 GPUs or more   vLLM on GPUs 0 and 1 (tensor parallel; arithmetic on GPU 0 alone), trainer on the next
#   with 2 GPUs, with 1   vLLM on GPU 0, trainer on GPU 1; both on the one, weights over Gloo
#   without a GPU         both on the CPU, in float32
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=scripts/lib/services.sh
source "$root/scripts/lib/services.sh"
# shellcheck source=scripts/lib/training.sh
source "$root/scripts/lib/training.sh"

run_prefix=gsm8k-broadcast
bridge_flags=(--weight-bridge-mode shared_vllm --use-shared-memory)

train "$@"
