#!/usr/bin/env bash
# Usage: scripts/run_gsm8k_reload.sh [MODEL] [--FLAG VALUE ...]; --help lists the flags.
#
# GRPO on GSM8K, weights as files that the running vLLM reads: recipes/gsm8k_reload.yaml.
exec "$(dirname "$0")/setup.sh" --run train gsm8k_reload "$@"
