"""To which model server a request goes, when, and how often again: health, throttle, admission, affinity.

Imports the errors of server_handling.
"""
