"""`atropos COMMAND`: one file per command, with `parser()` and `main(argv)`.

Imports every other room; only a command imports a command.
"""
