"""Held-out questions: asked, scored, averaged with their errors, kept.

Imports failures, files, sampling and server_handling.
"""
