#!/usr/bin/env bash
# Usage: scripts/agents_venv.sh [DIRECTORY]
#
# Makes a virtual environment with the packages of scripts/agents: openai-agents, mini-swe-agent and anthropic.
# Atropos needs none of them. The default DIRECTORY is .agents.
set -euo pipefail
if [[ " -h --help " == *" ${1:-none} "* ]]; then
  awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}" && exit 0
fi
directory="${1:-.agents}"
[ -x "$directory/bin/python" ] || "${PYTHON:-python3}" -m venv "$directory"
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check \
  openai==3.57.0 openai-agents==0.24.0 mini-swe-agent==2.4.6 litellm==1.110.2 anthropic==2.14.0
echo "The agents are in $directory: run one with $directory/bin/python"
