"""What a run shows while it runs and when it ends. Reads the supervisor's events and the files of the run.

Imports run_file, services and plan.
"""
