"""What a run writes about itself: metrics, samples, trained rows, plots, the model card.

Imports settings, data and bridges.
"""
