"""`atropos COMMAND` on runs that are there: what looks at them, changes one while it runs, or takes its model.

May import what the other commands may; `train` imports the page and the plot of its run from here.
"""
