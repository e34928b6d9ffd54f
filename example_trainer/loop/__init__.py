"""One step after another: fetch a batch, update, save, hand the weights over.

Imports every other room. `grpo.py` runs it.
"""
