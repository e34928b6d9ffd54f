"""The trainer's ranks: where each runs, how they start, meet and miss one another, which part of a tensor is whose.

Imports settings and memory.
"""
