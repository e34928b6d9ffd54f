#!/usr/bin/env bash
# Usage: scripts/vllm_contract.sh VERSION...
#
# Proves that releases of vLLM fit, without a GPU: downloads the Python files of each CUDA wheel (about 25 MB) and of
# Triton (150 MB, once) into ~/.cache/atropos/contract, then compares every name that we use, runs the launcher up to
# vLLM's engine configuration in each mode, and compares the exact trainer's bits with those of vLLM's CUDA model
# classes. About 3 minutes of CPU time per release. Records what is proven in tests/contract/proven.json and in
# docs/gpu.md; prints both lines where something does not fit.
#
#   PIP_INDEX_URL   the package index to use
#   ATROPOS_PYTHON  the Python to use (default: that of scripts/setup.sh)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
exec "${ATROPOS_PYTHON:-$root/.venv/bin/python}" -m tests.contract "$@"
