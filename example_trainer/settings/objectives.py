"""The loss of a step: independent choices, and the algorithms that are combinations of them.

    scores ──advantage──▶ A     log-probabilities ──ratio──▶ r     objective(r, A) ──loss mean──▶ one number
                                              corrections.py ──▶ weights of tokens ──┘

An objective is one file here with a function `token_loss` (the protocol `TokenLoss` of base.py), and its name in
`OBJECTIVES`. Importing this package loads no torch, because `--help` shows the names.
"""

from collections.abc import Mapping
from typing import Literal

OBJECTIVES = ("clip", "cispo")  # files of this directory; --objective also takes an import path

Algorithm = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
Advantage = Literal["group_std", "group_mean", "rloo"]
Ratio = Literal["token", "sequence_mean", "sequence_sum"]
LossMean = Literal["token", "sequence", "constant"]
Importance = Literal["none", "truncate", "mask"]
Level = Literal["token", "sequence"]
Kl = Literal["k1", "k2", "k3"]

# --algorithm: the settings that differ from the defaults, which are grpo's
PRESETS: Mapping[str, Mapping[str, object]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "group_mean", "loss_mean": "constant"},
    "dapo": {"clip_eps_high": 0.28, "mask_truncated": True},
    "gspo": {"ratio": "sequence_mean", "loss_mean": "sequence", "clip_eps": 3e-4, "clip_eps_high": 4e-4},
    "cispo": {"objective": "cispo", "clip_eps": 1.0, "clip_eps_high": 4.0},
    "rloo": {"advantage": "rloo"},
}
