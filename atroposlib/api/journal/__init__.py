"""Every change on disk before its reply leaves: the file, its head, its replay and its rescue, and dead letters.

Imports state.
"""
