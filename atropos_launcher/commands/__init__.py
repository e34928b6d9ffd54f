"""`atropos COMMAND`: one file per command, with `parser()` and `main(argv)`.

Imports all other folders; nothing imports a command but another command.
"""
