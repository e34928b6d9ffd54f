"""What the files of a run directory hold, as typed values: rows found by index and by text, metrics, settings, logs and
how the run ended. It knows no page and no route.
"""
