"""Write two splits of a hub dataset (those that it has) to a directory: train.jsonl and test.jsonl.

Started by path by `dataset.py`, which kills it when it is late.

    python hub_download.py openai/gsm8k main DIRECTORY train test
"""

import sys
from pathlib import Path


def main(dataset: str, name: str, directory: str, *wanted: str) -> None:
    """Exits 1 with the hub's own words as the last line of stderr when the hub gives nothing."""
    from datasets import load_dataset

    try:
        splits = load_dataset(dataset, name)
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
    found = {kind: split for kind, split in zip(("train", "test"), wanted, strict=True) if split in splits}
    if not found:
        raise SystemExit(f"it has no split {' or '.join(wanted)}; it has {', '.join(map(str, splits))}")
    for kind, split in found.items():
        splits[split].to_json(str(Path(directory) / f"{kind}.jsonl"))


if __name__ == "__main__":
    main(*sys.argv[1:])
