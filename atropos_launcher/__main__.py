"""`python -m atropos_launcher` is `atropos`."""

from atropos_launcher.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
