"""A launcher for the tests of Ray: `python ray_launch.py RUN_DIR PLAN`; the plan is JSON, each service of it the fields
of a `Service`.

It does what `atropos train --ray` does around its plan: it connects, checks and reserves, and has the supervisor start
each service by Ray, the first on this node, the next on the following one.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from atropos_launcher.console.console import PlainConsole
from atropos_launcher.placement import ray_cluster
from atropos_launcher.placement.addresses import Site
from atropos_launcher.placement.cores import CorePlacement
from atropos_launcher.placement.gpus import Placement
from atropos_launcher.plan.on_machine import on_machine
from atropos_launcher.service import Service
from atropos_launcher.services.supervisor import Limits, Supervisor
from atroposlib.errors import one_line_errors


def main() -> int:
    run_dir, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    machines = ray_cluster.connect(plan["address"], ray_cluster.Nodes.of(plan.get("nodes")), plan["silence_s"])
    ray_cluster.expect_ready(machines, plan.get("model", "a/hub-id"))
    ray_cluster.reserve(machines, [{"CPU": plan.get("CPU", 1), "GPU": plan.get("GPU", 0)}] * len(machines.all))
    site = Site(run_dir, "a/hub-id", Placement(), 0, (), os.environ, CorePlacement(()), machines)
    sees = {path: remedy.format(machines.first) for path, remedy in plan.get("sees", {}).items()}
    services = []
    for index, service in enumerate(plan["services"]):
        made = Service(**{"may_end": True, **tuples(service)})
        host = machines.all[index].host
        services.append(on_machine(made, host, site, sees=sees if machines.elsewhere(host) else None))
    with Supervisor(run_dir, services, PlainConsole(run_dir, {}), Limits(pause_s=1.0)) as supervisor:
        return supervisor.run()


def tuples(service: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `Service`, from JSON."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in service.items()}


if __name__ == "__main__":
    with one_line_errors("ray_launch"):
        sys.exit(main())
