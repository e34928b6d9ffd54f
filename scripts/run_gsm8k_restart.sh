#!/usr/bin/env bash
# Usage: scripts/run_gsm8k_restart.sh [MODEL] [--FLAG VALUE ...]; --help lists the flags.
#
# GRPO on GSM8K, checkpoints by restarts of vLLM: recipes/gsm8k_restart.yaml.
exec "$(dirname "$0")/setup.sh" --run train gsm8k_restart "$@"
