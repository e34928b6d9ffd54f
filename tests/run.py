"""What `scripts/test.sh` and the continuous integration run: ruff, the import contracts, mypy and pytest.

All arguments go to pytest. Stops at the first check that fails, with its exit status. mypy, which uses one core, runs
beside pytest; if it fails, pytest is stopped. Else the last line is pytest's summary.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
CHROMIUM_LIMIT_S = 600
TYPED = [
    "atropos_launcher",
    "atroposlib",
    "environments",
    "example_trainer",
    "sampler_doctor",
    "vllm_patching",
    "benchmarks",
    "tests",
]


def main() -> None:
    """Run the quick checks one after the other, then mypy and pytest."""
    os.chdir(ROOT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of tests start processes, which would compile all anew
    if os.environ.get("CI") == "true" and not shutil.which("chromium"):
        install_chromium()
    bin_of = Path(sys.executable).parent
    check("ruff", str(bin_of / "ruff"), "check", ".")
    check("the formatter", str(bin_of / "ruff"), "format", "--check", "--quiet", ".")
    check("import contracts", str(bin_of / "lint-imports"), "--no-logo", "--cache-dir", ".venv/setup/imports")
    tell("mypy, and pytest beside it (each test at most 300 s)")
    with tempfile.TemporaryFile("w+") as report:
        types = subprocess.Popen([sys.executable, "-m", "mypy", *TYPED], stdout=report, stderr=subprocess.STDOUT)
        words = ["pytest", "-n", "2", "--no-loadscope-reorder", *sys.argv[1:]]
        tests = subprocess.Popen([sys.executable, "-m", *words])
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
        try:
            sys.exit(status_of(types, report, tests))
        finally:
            for process in (types, tests):
                process.terminate()
                process.wait()


def status_of(types: subprocess.Popen[bytes], report: IO[str], tests: subprocess.Popen[bytes]) -> int:
    """The exit status: mypy's as soon as it fails, with its report, else pytest's."""
    while tests.poll() is None and types.poll() is None:
        time.sleep(0.2)
    if status := types.wait():
        tests.send_signal(signal.SIGINT)
        tests.wait()
        report.seek(0)
        print(f"\nmypy:\n{report.read()}", end="", flush=True)
    return status or tests.wait()


def tell(line: str) -> None:
    """Print a line with the time of day."""
    print(time.strftime("%H:%M:%S"), line, flush=True)


def check(name: str, *command: str) -> None:
    """Run one check; exit with its status if it fails."""
    tell(name)
    if status := subprocess.run(command, check=False).returncode:
        sys.exit(status)


def install_chromium() -> None:
    """Install Debian's Chromium, for the tests that show what a web page can do; elsewhere they are skipped without."""
    log = ROOT / ".venv/setup/logs/chromium.log"
    tell(f"Installing Debian's Chromium (at most {CHROMIUM_LIMIT_S} s, log {log.relative_to(ROOT)})")
    start = time.monotonic()
    install = "apt-get update && apt-get install -y --no-install-recommends chromium"
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                ["bash", "-c", install],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=CHROMIUM_LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            done = 124
    if done:
        sys.stderr.write("\n".join(log.read_text(errors="replace").splitlines()[-5:]) + "\n")
        sys.exit(f"test.sh: error: Chromium could not be installed (see {log}): install one that is found on PATH")
    tell(f"    done after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
