"""What the API knows: the queue, leases, who lives. Changes are values, so that the journal can replay them.

Imports nothing of the API's other directories.
"""
