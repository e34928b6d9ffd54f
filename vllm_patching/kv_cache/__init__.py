"""What vLLM's KV cache keeps when a new policy version is served (--kv-on-sync), and what it saves.

salts.py     in the engine process: which requests may share keys and values, by the version at which they began
session.py   in the API process: the conversation that a request belongs to
shared_rows.py  in the worker: what the cache cannot share, as a block is longer, is computed once
counted.py   in the API process: how many tokens were read, found in the cache, and read again
"""

from typing import Literal, get_args

from packaging.version import Version

OnSync = Literal["reset", "keep", "salt"]
# reset: nothing outlives a sync, and each sequence under way is read again with the new weights
# keep:  everything stays, so that even a new prompt may find keys and values of an older version
# salt:  conversations under way keep theirs; a new one shares only with those that began at its own version
ON_SYNC: tuple[OnSync, ...] = get_args(OnSync)
SALTED = "ATROPOS_KV_SALTED"  # 1 in every process of a server with `salt`; vLLM's plugin reads it
SALTS_SINCE = Version("0.32")  # whose engine process knows the version of its weights
