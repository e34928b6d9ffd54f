"""Processes of every part of the product: start them so that they end with their parent, tell one from a later one of
the same number, end a group, read their logs; what malloc does with the memory that one frees.

Imports only small helpers of atroposlib.
"""
