#!/usr/bin/env bash
# Usage: scripts/run_gsm8k_single_copy.sh [MODEL] [--FLAG VALUE ...]; --help lists the flags.
#
# GRPO on GSM8K, one copy of the weights for trainer and vLLM: recipes/gsm8k_single_copy.yaml.
exec "$(dirname "$0")/setup.sh" --run train gsm8k_single_copy "$@"
