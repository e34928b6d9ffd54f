"""How a model is loaded and computed: packed attention, fused parts, tensor parallelism.

Imports settings, data, memory and ranks.
"""
