"""Files of JSON lines that grow with a run: a row is written whole or not at all, a full disk is waited for, and older
parts are compressed and in the end removed. It imports `atroposlib.files` and `atroposlib.logs`.
"""
