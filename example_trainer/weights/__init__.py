"""What the weights are: as a model holds them, as bridges offer them, and as files.

Imports settings, ranks, model and optim.
"""
