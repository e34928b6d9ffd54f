#!/usr/bin/env bash
# Usage: scripts/run_gsm8k_restart.sh [MODEL] [--steps N] [--dataset arithmetic|gsm8k] [--dataset-path FILE]
#                                     [--run-name NAME] [--seed S] [--api-port P] [--vllm-port P] [--help]
#
# GRPO on GSM8K by checkpoint and restart (--weight-bridge-mode none): the trainer itself starts vLLM, writes a
# checkpoint every --vllm-restart-interval steps, ends vLLM and starts it from there. The slowest mode, and the one that
# needs nothing of vLLM but its command line. The interval is 1 for the arithmetic task, so that it samples as on-policy
# as the other modes, and 10 otherwise.
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

run_prefix=gsm8k-restart
vllm_owner=trainer
bridge_flags=(--weight-bridge-mode none)
arithmetic_flags=(--lr 2e-5 --vllm-restart-interval 1)
problems_flags=(--lr 1e-6 --vllm-restart-interval 10)

train "$@"
