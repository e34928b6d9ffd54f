"""A run file: what a run is made of, as people write it, and as a run keeps it.

Imports only the leaves of the launcher (`service`, `paths`) and the programs' settings.
"""
