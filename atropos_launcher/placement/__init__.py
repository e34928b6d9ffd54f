"""Where each process of a run goes: machine, GPUs, CPU cores, ports, addresses.

Imports run_file.
"""
