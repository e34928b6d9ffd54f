"""The API over HTTP: routes, keys, admission, connections, metrics. Imports every other room; `server.py` puts the
parts together.
"""
