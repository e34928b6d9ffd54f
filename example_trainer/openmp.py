"""How the trainer's OpenMP threads wait. Import it before torch, whose OpenMP reads the variable once, when it is
loaded.

Trainer and vLLM take turns on the same cores, and vLLM's worker goes on polling for a second after each request. A
thread that spins for its turn holds the core that the other needs: SmolLM2's AdamW step beside an idle vLLM on two
cores took 1,026 ms so, and 171 ms with threads that sleep.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
