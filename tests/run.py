"""What `scripts/test.sh` and the continuous integration run: ruff, the import contracts, mypy and pytest.

All arguments go to pytest. Stops at the first check that fails, with its exit status. The last line is pytest's
summary.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHROMIUM_LIMIT_S = 600
TYPED = ["atropos_launcher", "atroposlib", "environments", "example_trainer", "vllm_patching", "benchmarks", "tests"]


def main() -> None:
    """Run the checks one after the other, then become pytest."""
    os.chdir(ROOT)
    if os.environ.get("CI") == "true" and not shutil.which("chromium"):
        install_chromium()
    bin_of = Path(sys.executable).parent
    check("ruff", str(bin_of / "ruff"), "check", ".")
    check("the formatter", str(bin_of / "ruff"), "format", "--check", "--quiet", ".")
    check("import contracts", str(bin_of / "lint-imports"), "--no-logo", "--cache-dir", ".venv/setup/imports")
    check("mypy", sys.executable, "-m", "mypy", *TYPED)
    tell("pytest (each test at most 300 s)")
    words = [sys.executable, "-m", "pytest", "-n", "2", "--no-loadscope-reorder", *sys.argv[1:]]
    os.execv(sys.executable, words)


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
