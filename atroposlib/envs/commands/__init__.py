"""What an environment's program does by its first word: serve, process, evaluate, and how it starts.

Imports run; `base.py` imports both.
"""
