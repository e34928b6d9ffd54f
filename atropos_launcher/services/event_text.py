"""The supervisor's events in words: one sentence each, for the console and for launcher.log."""

from atropos_launcher.services.events import (
    Died,
    Ended,
    Ending,
    Event,
    Interrupted,
    Killed,
    LogLine,
    Lost,
    NotUp,
    Outlived,
    Quiet,
    Restarted,
    Scaled,
    Started,
    StillThere,
    StillWaiting,
    Up,
    Waiting,
)
from atroposlib.processes.log_files import printable


def text(event: Event) -> str:  # noqa: C901  # one line an event
    """Describe what happened, in a sentence."""
    match event:
        case Started(service, pid, log):
            return f"Started {service} (pid {pid}, log {log})"
        case Waiting(service, url, limit_s, log):
            return f"Waiting for {service} at {url}, at most {limit_s:.0f} s (log {log})"
        case StillWaiting(service, url, left_s):
            return f"Still waiting for {service} at {url}, {left_s:.0f} s left"
        case Up(service, after_s):
            return f"{service} is up after {after_s:.0f} s"
        case NotUp(service, url, limit_s):
            return f"{service} did not answer at {url} within {limit_s:.0f} s."
        case Ended(service):
            return f"{service} has ended"
        case Died(service, pid, how, host=host):
            return f"{service}{f' on {host}' if host else ''} (pid {pid}) died: {how}."
        case Lost(service, how, log):
            return f"{service} died: {how}. The run continues without it (log {log})"
        case Restarted(service, pid, attempt, attempts):
            return f"Restarted {service} (pid {pid}), restart {attempt} of {attempts}"
        case Outlived(services, limit_s):
            return f"Still running {limit_s:.0f} s after the others ended: {' '.join(services)}."
        case LogLine(service, line):
            return f"{service} {printable(line)}"
        case Quiet(for_s, lines):
            return f"No step for {for_s:.0f} s: {printable('. '.join(lines))}"
        case Scaled(line):
            return printable(line)
        case Interrupted(number):
            return f"Interrupted by {number.name}"
        case Ending(services, limit_s):
            return f"Ending {' '.join(services)} (at most {limit_s:.0f} s)"
        case Killed(services, after_s):
            return f"Killed, still running after {after_s:.0f} s: {' '.join(services)}"
        case StillThere(services):
            return f"Still running after SIGKILL: {' '.join(services)}"
