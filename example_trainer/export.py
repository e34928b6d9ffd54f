"""`python -m example_trainer.export` is `atropos export`."""

from example_trainer.weights.export import main

if __name__ == "__main__":
    raise SystemExit(main())
