"""`python -m sampler_doctor --sampler URL --model DIR`: prints the table and writes the receipt.

Exit status 0 without a failing row, 1 with one, 2 where nothing could be tested.
"""

import sys
import time
from collections.abc import Sequence

from atroposlib.config import load_config
from atroposlib.errors import one_line_errors
from atroposlib.extras import need
from sampler_doctor.settings import SamplerConfig

PROG = "atropos doctor"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    config = load_config(SamplerConfig, argv, prog=PROG)
    with one_line_errors(PROG):
        need("doctor", f"{PROG} --sampler", "torch", *(["peft"] if config.adapter else []))
        return _examine(config)


def _examine(config: SamplerConfig) -> int:
    started = time.perf_counter()
    print(f"Loading the reference, {config.model}", file=sys.stderr, flush=True)
    from sampler_doctor.report import summary, write_receipt
    from sampler_doctor.run import Doctor

    doctor = Doctor(config)
    versions = doctor.versions()
    print("\n".join(f"{name}: {value}" for name, value in versions.items()), flush=True)
    rows, after = [], ""
    for row in doctor.rows():
        if row.after != after:
            after = row.after
            print(f"\nafter an update: {after}")
        print(row, flush=True)
        rows.append(row)
    seconds = time.perf_counter() - started
    write_receipt(config.receipt, versions, rows, seconds)
    print(f"{summary(rows, seconds)}; {config.receipt} has all of it, for an issue")
    return 1 if any(row.result == "fails" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
