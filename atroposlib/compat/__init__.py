"""Rewards, helpers, evaluations and commands that only users of the archived ancestor need.

Their import paths (`atroposlib.envs.reward_fns`, `atroposlib.utils.io`, ...) lead here, see `atroposlib.old_paths`.
Nothing in the product imports this package; it imports the product.
"""
