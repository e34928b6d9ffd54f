"""`atropos COMMAND`: one file per command, with `parser()` and `main(argv)`. Those for runs that are there are in
existing_runs/.

Imports every other room; only a command imports a command.
"""
