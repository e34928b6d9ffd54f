"""The problems of an environment: read, split, looked through once, limited.

Imports server_handling.
"""
