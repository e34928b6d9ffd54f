#!/usr/bin/env bash
# Usage: scripts/run_gsm8k_lora_restart.sh [MODEL] [--FLAG VALUE ...]; --help lists the flags.
#
# GRPO on GSM8K, LoRA adapters by restarts of vLLM: recipes/gsm8k_lora_restart.yaml.
exec "$(dirname "$0")/setup.sh" --run train gsm8k_lora_restart "$@"
