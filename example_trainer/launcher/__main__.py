"""`python -m example_trainer.launcher` is `atropos`."""

from example_trainer.launcher.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
