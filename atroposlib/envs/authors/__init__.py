"""What an environment's author wrote, called and judged: the checks of what it returns, and whose line an error is.

Imports rollouts and server_handling.
"""
