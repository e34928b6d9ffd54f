"""One step after another: fetch a batch, update, save, hand the weights over.

Imports all other folders. `grpo.py` runs it.
"""
