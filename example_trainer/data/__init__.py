"""From scored groups to rows of tokens: advantages, loss weights, staleness, packing.

Computes on plain arrays. Imports settings.
"""
