#!/usr/bin/env bash
# Usage: scripts/bridge_doctor.sh --mode MODE [--model M] [--vllm-port P[,P...]] [FLAGS]
#
# Before a run: checks versions, limits, environment variables, ports and who holds them, running vLLM servers
# (reachable, bridge on, key right, free of another trainer), ranks against GPUs or cores, memory, shared memory, and
# that vLLM holds the trainer's model. Prints one line per check: ok, warn or fail, what was found, the limit, what to
# change. Exit status 1 if one fails. It changes nothing.
#
#   --mode MODE                                           the bridge: the MODE of scripts/run_gsm8k_MODE.sh
#   --model M, --tensor-parallel-size N, --dtype D        what vLLM serves, or will
#   --vllm-host H, --vllm-port P[,P...], --hosts-file F   its servers; --api-port P   the batching API
#   --master-addr A, --master-port P                      where the trainer meets vLLM's workers
#   --save-path DIR                                       its checkpoints
#   --flags               every flag, with its environment variable's default resolved by --dry-run
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
source "$root/scripts/lib/common.sh"

case ${1:-} in
  -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
  --flags) set -- --help ;;
esac
python=${ATROPOS_PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || die "$python is not there; run scripts/setup.sh"
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m scripts.lib.doctor "$@"
