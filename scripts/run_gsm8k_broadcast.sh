#!/usr/bin/env bash
# Usage: scripts/run_gsm8k_broadcast.sh [MODEL] [--FLAG VALUE ...]; --help lists the flags.
#
# GRPO on GSM8K, new weights broadcast into the running vLLM: recipes/gsm8k_broadcast.yaml.
exec "$(dirname "$0")/setup.sh" --run train gsm8k_broadcast "$@"
