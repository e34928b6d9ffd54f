"""Scored groups as they arrive: decoded, checked, kept as the bytes they came in.

Imports only the wire.
"""
