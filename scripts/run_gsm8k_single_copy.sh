#!/usr/bin/env bash
# Usage: scripts/run_gsm8k_single_copy.sh [MODEL] [--steps N] [--dataset arithmetic|gsm8k] [--dataset-path FILE]
#                                         [--run-name NAME] [--seed S] [--api-port P] [--vllm-port P] [--help]
#
# GRPO on GSM8K with one copy of the weights (--weight-bridge-mode shared_vllm --single-copy): the trainer's parameters
# are vLLM's own tensors, so that the optimizer step, taken while generation is paused, is all there is to a sync and no
# byte moves.
#
#   with 3 GPUs or more   vLLM and trainer both on GPUs 0 and 1 (tensor parallel; the arithmetic task on GPU 0 alone)
#   with 1 GPU or 2       both on GPU 0, by CUDA IPC; bfloat16 weights are updated through a float32 copy in the trainer
#   without a GPU         both on the CPU, by shared memory, in float32
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=scripts/lib/services.sh
source "$root/scripts/lib/services.sh"
# shellcheck source=scripts/lib/training.sh
source "$root/scripts/lib/training.sh"

run_prefix=gsm8k-single-copy
layout=same
bridge_flags=(--weight-bridge-mode shared_vllm --single-copy)

train "$@"
