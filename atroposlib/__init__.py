"""The platform library: batching API, environment framework, inference clients, command-line tools.

Imports neither torch nor vLLM (a test proves it), so an environment server stays a light process.
"""

from atroposlib import old_paths as old_paths
