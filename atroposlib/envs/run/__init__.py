"""An environment while it runs: workers, pacing, its link to the batching API, checkpoints, sample rows.

Imports authors, data and evaluation.
"""
