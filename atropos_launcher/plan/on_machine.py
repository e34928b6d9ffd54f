"""A service as Ray starts it on a machine of the run: by services/ray_client.py."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from atropos_launcher.placement.addresses import Site
from atropos_launcher.service import Service


def on_machine(
    service: Service,
    host: str,
    site: Site,
    files: Sequence[str] = (),
    sees: Mapping[str, str] | None = None,
    group: str = "",
) -> Service:
    """`service` on that host; without Ray, as it is. `files` of the run's directory are sent there; `sees` are files
    that must be there already, each with what to do where it is not. `group` names its placement group, by default the
    host's.
    """
    machines = site.machines
    if not machines.ray:
        return service
    flags = ["--host", host, "--name", service.name, "--ray", machines.ray, "--group", group or machines.group_on(host)]
    flags += ["--silence-s", f"{machines.silence_s:g}", "--folder", str(site.run_dir)]
    flags += ["--variables", ",".join(sorted(service.environment)), "--cores", ",".join(map(str, service.cores))]
    flags += [word for name in files for word in ("--file", str(site.run_dir / name))]
    flags += [word for path, remedy in (sees or {}).items() for word in ("--sees", path, remedy)]
    command = (sys.executable, "-u", "-m", "atropos_launcher.services.ray_client", *flags, "--", *service.command)
    return replace(service, command=command, cores=(), host=machines.elsewhere(host))
