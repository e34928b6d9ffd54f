"""Training with the bits of vLLM: kernels and a model without dependence on the batch, their check, and the replay.

Imports settings, data, ranks, model and bridges.
"""
