"""What a release of vLLM does once it is started: tests of tests/integration, run on it in a process.

Called by `__main__.py` and by the nightly test beside this file. A step is passed, refused by our server in words, or
failed.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.contract.uses import ROOT
from tests.integration.namespaces import tied
from tests.releases import environment

DEADLINE_S = 1500
PASSED = "passed"
DOCTOR, EXACT = "sampler doctor", "exact steps"
STEPS = {  # by their names in the table, the tests of each
    "serves and samples": ["test_bridge.py::test_generate_returns_one_logprob_a_token_at_the_sampled_temperature"],
    "broadcast": ["test_bridge.py::test_new_weights_are_served_and_agree_with_the_trainer[vllm_server]"],
    "single copy": ["test_single_copy.py::test_updates_in_place_are_served_without_moving_bytes[vllm_server]"],
    "LoRA": ["test_lora.py::test_every_version_is_served_as_trained_and_environments_follow"],
    DOCTOR: [
        f"test_sampler_doctor.py::{test}"
        for test in (
            "test_no_row_fails_on_a_stock_server_with_an_adapter",
            "test_an_adapter_that_is_not_the_served_one_is_found",
        )
    ],
    EXACT: [
        f"test_bit_exact.py::test_three_steps_of_training_stay_on_policy_to_the_bit[{path}]"
        for path in ("use_shared_memory", "single_copy")
    ],
}
REFUSAL = re.compile(r"on this machine products with a weight .*? depend on the batch: .*? \(oneDNN[^)]*\)")
WHAT_RUNS = "import json, torch, vllm_patching.version as v; print(json.dumps([str(v.VERSION), torch.__version__]))"


class NotStarted(RuntimeError):
    """A release that is not what was asked for, or whose tests were not run."""


@dataclass(frozen=True)
class Started:
    """The PyTorch that a release ran on, and by step "passed", "refused: WHY" or "failed: WHY"."""

    torch: str
    steps: dict[str, str]

    @property
    def failed(self) -> dict[str, str]:
        return {step: result for step, result in self.steps.items() if result.startswith("failed")}


def start(version: str, steps: Sequence[str] = tuple(STEPS)) -> Started:
    """Install the release and run these steps on it. Raises NotInstalled, NotStarted."""
    path = os.pathsep.join([*environment.path_of(version), str(ROOT)])
    own = {"PYTHONPATH": path, "VLLM_CACHE_ROOT": str(environment.CACHE / f"of-vllm-{version}")}
    variables = {name: value for name, value in os.environ.items() if name != "CI"} | own
    found, torch = json.loads(_run([sys.executable, "-c", WHAT_RUNS], variables, 120).splitlines()[-1])
    if found != version:
        raise NotStarted(f"vLLM {version} is installed in {path}, but {found} would start")
    tests = [f"tests/integration/{test}" for step in steps for test in STEPS[step]]
    with tempfile.TemporaryDirectory(prefix="atropos-releases-") as folder:
        report = Path(folder, "report.xml")
        words = ["-m", "pytest", "-q", "-n", "0", "--nightly", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        shown = _run([sys.executable, *words, f"--junitxml={report}", *tests], variables, DEADLINE_S)
        if not report.exists():
            raise NotStarted(f"vLLM {version}: no test was run:\n{_end(shown)}")
        logs = [log.read_text(errors="replace") for log in Path(folder, "tests").glob("vllm_exact*/vllm.log")]
        return Started(torch, results(report.read_text(encoding="utf-8"), "".join(logs), steps))


def results(report: str, exact_log: str, steps: Sequence[str] = tuple(STEPS)) -> dict[str, str]:
    """By step the result, out of pytest's report (JUnit XML) and the log of the server of exact steps. A step that was
    not run has failed.
    """
    cases: dict[str, str] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}"
        wrong = [each for each in case if each.tag in ("failure", "error", "skipped")]
        cases[name] = f"failed: {_end(wrong[0].text or 'it was skipped')}" if wrong else PASSED
    found = {step: _first_wrong([cases.get(test, "failed: it was not run") for test in STEPS[step]]) for step in steps}
    refusal = REFUSAL.search(exact_log)
    return found | ({EXACT: f"refused: {refusal.group()}"} if refusal and found.get(EXACT, PASSED) != PASSED else {})


def _first_wrong(results: Sequence[str]) -> str:
    return next((each for each in results if each != PASSED), PASSED)


def _run(command: list[str], variables: dict[str, str], deadline_s: float) -> str:
    """What the command prints, whatever its exit status."""
    try:
        done = subprocess.run(
            tied(command, "TERM"),
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotStarted(f"{' '.join(command[:4])} took over {deadline_s:.0f} s") from error
    return done.stdout


def _end(text: str) -> str:
    return "\n".join(text.splitlines()[-40:])
