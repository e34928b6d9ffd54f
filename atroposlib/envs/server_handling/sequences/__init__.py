"""What was sampled, token by token: the arguments, the reply and its checks, the sequences that a conversation makes.

Imports the errors of server_handling.
"""
