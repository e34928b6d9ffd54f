#!/usr/bin/env bash
# Usage: scripts/quickstart.sh [MODEL] [--FLAG VALUE ...]; --help lists the flags.
#
# Sets up if needed, then `atropos quickstart`: SmolLM2-135M-Instruct learns sums and products on two CPU cores.
exec "$(dirname "$0")/setup.sh" --run quickstart "$@"
