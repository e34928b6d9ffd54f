"""A launcher for the tests of Ray: `python ray_launch.py RUN_DIR '{"address": ..., "services": {"NAME": [WORDS]}}'`.

It does what `atropos train --ray` does around its plan: it connects, checks and reserves, and has the supervisor start
each service by Ray, the first on this node, the next on the following one. `CPU` is what it reserves on each.
"""

import json
import sys
from pathlib import Path

from atropos_launcher.console.console import PlainConsole
from atropos_launcher.placement import ray_cluster
from atropos_launcher.service import Service
from atropos_launcher.services.supervisor import Supervisor
from atroposlib.errors import one_line_errors


def main() -> int:
    run_dir, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    machines = ray_cluster.connect(plan["address"], plan.get("nodes"), plan["silence_s"], dry_run=False)
    ray_cluster.expect_ready(machines, plan.get("model", "a/hub-id"))
    ray_cluster.reserve(machines, [{"CPU": plan.get("CPU", 1), "GPU": 0}] * len(machines.all))
    services = []
    for index, (name, words) in enumerate(plan["services"].items()):
        host = machines.all[index].host
        flags = ["--host", host, "--name", name, "--ray", machines.ray, "--group", machines.group_of(index)]
        flags += ["--silence-s", str(plan["silence_s"]), "--folder", str(run_dir), "--variables", "OWN_SECRET"]
        program = (sys.executable, "-u", "-m", "atropos_launcher.services.remote_client")
        services.append(Service(name, (*program, *flags, "--", *words), may_end=True, host=machines.elsewhere(host)))
    with Supervisor(run_dir, services, PlainConsole(run_dir, {})) as supervisor:
        return supervisor.run()


if __name__ == "__main__":
    with one_line_errors("ray_launch"):
        sys.exit(main())
