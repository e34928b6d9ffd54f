"""What a model and its training take in bytes, by arithmetic, and what malloc does with bytes that are free again.

Loads no torch, because the launcher plans with it. Imports settings and data.
"""
