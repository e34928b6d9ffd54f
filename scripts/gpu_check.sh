#!/usr/bin/env bash
# Usage: scripts/gpu_check.sh [--rows A,B] [--out DIR [--skip-passed]] [--list] [--help]
#
# `atropos gpu-check`: runs every check of Atropos that needs a GPU, and prints a table of the results.
exec "$(dirname "$0")/setup.sh" --run gpu-check "$@"
