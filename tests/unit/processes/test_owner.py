"""One owner of starting, watching and ending processes: nobody else asks the kernel for it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRODUCT = ("atropos_launcher", "atroposlib", "environments", "example_trainer", "vllm_patching")
# verifiers' own environment, where that file runs, has nothing of this project
ALONE = "atroposlib/child_processes/verifiers_child.py"


@pytest.mark.parametrize(
    ("what", "owners"),
    [
        (r"\bos\.killpg\(", {"groups.py", ALONE}),
        (r"\bstart_new_session=True", {"async_child.py", "child_group.py", ALONE}),
        (r"PR_SET_PDEATHSIG", {"exec_child.py"}),
        (r"/proc/\{?\w+\}?/stat\b", {"identity.py"}),
        (r"/proc/\{?\w+\}?/maps\b", {"shared_memory.py"}),
        (r"random/boot_id", {"identity.py"}),
    ],
)
def test_what_ends_or_identifies_processes_stands_in_one_place(what: str, owners: set[str]) -> None:
    files = (path for package in PRODUCT for path in (ROOT / package).rglob("*.py"))
    found = {str(path.relative_to(ROOT)) for path in files if re.search(what, path.read_text(encoding="utf-8"))}
    assert found == {each if "/" in each else f"atroposlib/processes/{each}" for each in owners}
