#!/usr/bin/env bash
# Usage: scripts/vllm_started.sh [--step NAME] [VERSION...]
#
# Starts releases of vLLM's CPU build, without a VERSION every one that the package index offers in the supported range.
# Installs each beside the packages of scripts/setup.sh, into ~/.cache/atropos/releases/VERSION (0.4 GB; 5 GB where it
# needs another PyTorch), then runs tests of tests/integration on it: it serves and samples, and takes a broadcast, a
# single copy, a LoRA adapter and exact steps, and no row of the sampler doctor fails on it without our plugins. Two to
# five minutes on two cores per release; with --step "sampler doctor", that step alone. Records the results in
# tests/releases/started.json and in docs/gpu.md. Prints a failure with the end of its log, and then exits with status
# 1.
#
#   PIP_*           pip's own settings (index, proxy, certificates, cache) are honoured
#   ATROPOS_PYTHON  the Python to use (default: that of scripts/setup.sh)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
exec "${ATROPOS_PYTHON:-$root/.venv/bin/python}" -m tests.releases "$@"
