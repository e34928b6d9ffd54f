"""`scripts/vllm_contract.sh VERSION...`: all proofs of each release, recorded in proven.json and in docs/gpu.md.

A proof that fails is printed with both sides and leaves the record; the exit status is then 1. A new release is one
more VERSION.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from packaging.version import Version

from tests import tables
from tests.contract import releases
from tests.contract.uses import ROOT
from tests.contract.wheels import NoWheel

RECORD = Path(__file__).with_name("proven.json")
PAGE = ROOT / "docs/gpu.md"
BEGIN, END = "<!-- proven releases: written by scripts/vllm_contract.sh -->", "<!-- end of proven releases -->"
Record = dict[str, dict[str, list[str]]]  # by release and part, the proofs that succeeded


def main(versions: list[str], only: list[str]) -> int:
    """Prove each release; 0 if all are."""
    record, status = recorded(), 0
    for version in versions:
        proven = record.setdefault(version, {})
        for part, name, proof in proofs(version):
            if only and not {part, name} & set(only):
                continue
            names = proven.setdefault(part, [])
            start = time.monotonic()
            try:
                proof()
            except (NoWheel, releases.NotProven) as error:
                print(f"vLLM {version}: {part}, {name}: {error}", file=sys.stderr)
                status = 1
                proven[part] = [each for each in names if each != name]
            else:
                print(f"vLLM {version}: {part}, {name}: proven in {time.monotonic() - start:.0f} s", flush=True)
                proven[part] = [*names, name] if name not in names else names
            write(record)
    return status


def recorded() -> Record:
    """What was proven, by release, the oldest first."""
    return dict(json.loads(RECORD.read_text(encoding="utf-8"))) if RECORD.exists() else {}


def write(record: Record) -> None:
    """Keep it, and show it on the page."""
    ordered = {version: record[version] for version in sorted(record, key=Version)}
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), ordered), encoding="utf-8")


def proofs(version: str) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Each with its part and its name."""
    yield "symbols", "all", partial(releases.check_symbols, version)
    for mode in releases.MODES:
        yield "configuration", mode, partial(releases.check_configuration, version, mode)
    for family, dtype in releases.MODELS:
        yield "bits", f"{family} {dtype}", partial(releases.check_bits, version, family, dtype, releases.MODELS)


def with_table(page: str, record: Record) -> str:
    """The page with the table of `record` between its marks."""
    parts = {"symbols": "symbols, flags, routes", "configuration": "engine configuration", "bits": "exact bits"}
    every = [f"{family} {dtype}" for family, dtype in releases.MODELS]

    def cell(names: list[str]) -> str:
        return "all" if sorted(names) == sorted(every) else ", ".join(names)

    rows = [[version, *(cell(proven.get(part, [])) for part in parts)] for version, proven in record.items()]
    return tables.with_table(page, BEGIN, END, ["vLLM", *parts.values()], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="vllm_contract.sh", description="Prove releases of vLLM without a GPU.")
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="a release of vLLM, as 0.33.0")
    parser.add_argument("--only", action="append", default=[], help="one part or proof: symbols, exact, ...")
    asked = parser.parse_args()
    sys.exit(main(asked.versions, asked.only))
