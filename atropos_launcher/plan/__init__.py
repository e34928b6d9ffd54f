"""From a command line and a run file to the services of a run: each program's settings, command and variables.

Imports run_file, placement and services.
"""
