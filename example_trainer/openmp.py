"""How the trainer's OpenMP threads wait. Import it before torch, whose OpenMP reads the variable once, when it is
loaded.

Trainer and vLLM take turns on the same cores, and vLLM's worker keeps polling for a second after each request. A thread
that spins while it waits occupies the core that the other needs. SmolLM2's AdamW step next to an idle vLLM on two cores
took 1,026 ms with spinning threads and 171 ms with sleeping ones.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
