"""The agent endpoint: programs that know only an API chat with the model in training, and their tokens are kept.

It may import all of atroposlib but `testing` and `compat`; environments import it.
"""
