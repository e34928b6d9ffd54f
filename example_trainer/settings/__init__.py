"""Every flag of the trainer, with its checks; one file per part.

Imports only `example_trainer.errors` and atroposlib, and no torch: `--help`, `--dry-run` and the launcher read it.
"""
