"""What a model and its training take in bytes, by arithmetic.

Loads no torch, because the launcher plans with it. Imports settings and data.
"""
