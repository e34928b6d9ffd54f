#!/usr/bin/env bash
# Usage: scripts/run_gsm8k_lora.sh [MODEL] [--FLAG VALUE ...]; --help lists the flags.
#
# GRPO on GSM8K, LoRA adapters that the running vLLM loads: recipes/gsm8k_lora.yaml.
exec "$(dirname "$0")/setup.sh" --run train gsm8k_lora "$@"
