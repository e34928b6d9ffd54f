"""What a step minimises: one file per loss, chosen by `--loss`.

To add one, write `objectives/NAME.py` with a function `token_loss` (the protocol `TokenLoss` of base.py) and add NAME
to `Loss`. The terms for --kl-coef and --entropy-coef are added to every loss. Importing this package loads no torch,
because `--help` shows the names.
"""

from typing import Literal

Loss = Literal["grpo"]
