"""Typed records of everything that two processes exchange. This lowest layer uses only msgspec and the standard
library.

`batching` is the batching API's, `bridge` the weight bridge's, `folders` a directory that the trainer writes and vLLM
reads. Both ends of a connection import the same record.
"""
