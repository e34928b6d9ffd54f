"""The processes of a run while they live: started, recorded, watched, restarted, ended. Knows nothing of training.

Imports placement, for the words that enter another machine.
"""
