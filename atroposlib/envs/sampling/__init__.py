"""What a request to a model asks for, and what of it a trainer can replay.

Imports server_handling.
"""
