"""`scripts/vllm_started.sh [VERSION...]`: starts each release, and records the results in started.json and docs/gpu.md.

Without a VERSION, all that the package index offers in the supported range. With --step, that step alone, whose result
goes beside those that are recorded. A step that fails is printed with the end of its log; the exit status is then 1.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from tests import tables
from tests.contract.uses import ROOT
from tests.contract.wheels import NoWheel, offered
from tests.releases.environment import PACKAGE, NotInstalled
from tests.releases.started import STEPS, NotStarted, Started, start
from vllm_patching.version import is_supported

RECORD = Path(__file__).with_name("started.json")
PAGE = ROOT / "docs/gpu.md"
BEGIN, END = "<!-- started releases: written by scripts/vllm_started.sh -->", "<!-- end of started releases -->"


def main(versions: list[str], steps: Sequence[str] = tuple(STEPS)) -> int:
    """Start each release; 0 if none of their steps failed. Raises NoWheel."""
    offered_now, status = supported(), 0
    if others := [version for version in versions if version not in offered_now]:
        raise NoWheel(f"the index offers {', '.join(offered_now)} of the supported range, not {', '.join(others)}")
    for version in versions or offered_now:
        began = time.monotonic()
        try:
            found = start(version, steps)
        except (NotInstalled, NotStarted) as error:
            print(f"vLLM {version}: {error}", file=sys.stderr)
            status = 1
            keep(offered_now, version, None)
            continue
        for step, result in found.steps.items():
            print(f"vLLM {version}, PyTorch {found.torch}: {step}: {result}", flush=True)
        print(f"vLLM {version}: {time.monotonic() - began:.0f} s", flush=True)
        status = 1 if found.failed else status
        keep(offered_now, version, entry(found))
    return status


def supported() -> list[str]:
    """The releases that the package index offers in the supported range. Raises NoWheel."""
    return [str(each) for each in offered(PACKAGE) if is_supported(each)]


def recorded() -> dict[str, Any]:
    """`offered`, a list of releases, and `started`, the results of each by step."""
    return dict(json.loads(RECORD.read_text(encoding="utf-8")))


def keep(offered_now: list[str], version: str, found: dict[str, str] | None) -> None:
    """Put the results of a release into the record as it is now, in place of earlier ones of the same steps."""
    earlier = recorded()["started"]
    others = {each: results for each, results in earlier.items() if each != version}
    write({"offered": offered_now, "started": others | ({version: earlier.get(version, {}) | found} if found else {})})


def entry(found: Started) -> dict[str, str]:
    """What the record keeps: of a failure no log."""
    failed = dict.fromkeys(found.failed, "failed")
    return {"PyTorch": found.torch, **found.steps, **failed}


def write(record: dict[str, Any]) -> None:
    """Keep it, and show it on the page."""
    record["started"] = {version: record["started"][version] for version in sorted(record["started"], key=Version)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


def with_table(page: str, record: dict[str, Any]) -> str:
    """The page with the table of `record` between its marks."""
    head = ["vLLM", "PyTorch", *STEPS]
    rows = [
        [version, found["PyTorch"], *(found.get(step, "not run") for step in STEPS)]
        for version, found in record["started"].items()
    ]
    return tables.with_table(page, BEGIN, END, head, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="vllm_started.sh", description="Start releases of vLLM's CPU build.")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="a release, as 0.28.0; without, all offered")
    parser.add_argument("--step", choices=STEPS, help="run this step alone; without, all")
    asked = parser.parse_args()
    try:
        sys.exit(main(asked.versions, [asked.step] if asked.step else tuple(STEPS)))
    except NoWheel as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
