"""Write a hub dataset's train and test records (those that it has) to a directory as JSONL.

Started by path by `problems.py`, which kills it when it is late.

    python hub_download.py openai/gsm8k main FOLDER
"""

import sys
from pathlib import Path


def main(dataset: str, name: str, folder: str) -> None:
    """Exits 1 with the hub's own words as the last line of stderr when the hub gives nothing."""
    from datasets import load_dataset

    try:
        splits = load_dataset(dataset, name)
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
    for split in {"train", "test"} & set(splits):
        splits[split].to_json(str(Path(folder) / f"{split}.jsonl"))


if __name__ == "__main__":
    main(*sys.argv[1:])
