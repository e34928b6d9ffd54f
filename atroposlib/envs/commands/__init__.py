"""What an environment's program does by its first word: serve, process, evaluate, and how it starts.

Imports run, which `base.py` and the classes above it do too.
"""
