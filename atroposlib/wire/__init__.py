"""What two processes tell each other, as typed records: the ground floor, on msgspec and the standard library alone.

`batching` is the batching API's, `bridge` the weight bridge's, `folders` what a directory holds that the trainer writes
and vLLM reads. Both ends of a connection import the same record.
"""
