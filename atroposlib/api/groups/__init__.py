"""Scored groups as they arrive: decoded, checked, kept as the bytes they came in.

Imports nothing of the API's other directories.
"""
