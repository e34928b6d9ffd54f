#!/usr/bin/env bash
# Usage: scripts/run_gsm8k_reload.sh [MODEL] [--steps N] [--dataset arithmetic|gsm8k] [--dataset-path FILE]
#                                    [--run-name NAME] [--seed S] [--api-port P] [--vllm-port P] [--help]
#
# GRPO on GSM8K with weights handed over as files (--weight-bridge-mode reload): after every step the trainer writes the
# model to a directory, and the running vLLM reads it while generation goes on and swaps it in. It needs no network
# between trainer and vLLM but HTTP, only a file system that both see under the same path.
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

run_prefix=gsm8k-reload
bridge_flags=(--weight-bridge-mode reload)

train "$@"
