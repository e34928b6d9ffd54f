"""A service as it runs on a machine of --hosts, or by --ray on any: by services/remote_client.py."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from atropos_launcher.placement.addresses import Site
from atropos_launcher.service import Service
from atropos_launcher.services import remote_agent
from atroposlib.flags import ConfigError


def on_machine(
    service: Service, host: str, site: Site, files: Sequence[str] = (), sees: Mapping[str, str] | None = None
) -> Service:
    """`service` on that host. `files` of the run's directory are sent there; `sees` are files that must be there
    already, each with what to do where it is not. Raises ConfigError for paths that a remote shell would change.
    """
    machines = site.machines
    if not machines.ray and not machines.elsewhere(host):
        return service
    for path in (sys.executable, remote_agent.__file__):
        if shlex.quote(path) != path and not machines.ray:
            raise ConfigError(
                f"--hosts: the shell on {host} would not take the path {path!r} literally: install Atropos under a path"
                " without spaces and special characters"
            )
    flags = ["--host", host, "--name", service.name]
    if machines.ray:
        flags += ["--ray", machines.ray, "--group", machines.group_of(machines.index_of(host))]
    else:
        flags += ["--remote-command", machines.remote]
    flags += ["--silence-s", f"{machines.silence_s:g}", "--folder", str(site.run_dir)]
    flags += ["--variables", ",".join(sorted(service.environment)), "--cores", ",".join(map(str, service.cores))]
    flags += [word for name in files for word in ("--file", str(site.run_dir / name))]
    flags += [word for path, remedy in (sees or {}).items() for word in ("--sees", path, remedy)]
    command = (sys.executable, "-u", "-m", "atropos_launcher.services.remote_client", *flags, "--", *service.command)
    return replace(service, command=command, cores=(), host=machines.elsewhere(host))
