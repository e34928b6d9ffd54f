"""What the doctor and `atropos gpu-check` find out: mostly pure functions.

Imports placement and services.
"""
