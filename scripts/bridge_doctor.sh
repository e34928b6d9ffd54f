#!/usr/bin/env bash
# Usage: scripts/bridge_doctor.sh --mode MODE [--FLAG VALUE ...]; --help lists the flags.
#
# `atropos doctor`: checks machine, ports and running servers before a run, and changes nothing.
exec "$(dirname "$0")/setup.sh" --run doctor "$@"
