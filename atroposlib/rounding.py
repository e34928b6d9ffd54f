"""How far two correct computations of one policy may be apart, because floating-point sums are rounded.

The trainer's decode probe and the sampler doctor call it. The factors were measured between vLLM and transformers: 3 to
24 in float32, where sums round too, and 1 to 12 in bfloat16; and 364 in float32 between two kernels of PyTorch, in a
random model of six layers whose attention is sharp.
"""

from collections.abc import Sequence

# Root mean square difference that rounding makes, over the machine epsilon and over the spread (standard deviation over
# the vocabulary) of log-probabilities.
EPSILON = {"float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.8e-3}
ROUNDING = {"float32": 1000.0, "float16": 8.0, "bfloat16": 24.0}


def rounding_limit(dtypes: Sequence[str], spread: float) -> float:
    """Return how far log-probabilities of one policy may be apart, in nats, root mean square, by the rounding of the
    coarsest of `dtypes`, where they spread by `spread` nats over the vocabulary (standard deviation).
    """
    return spread * max(ROUNDING[dtype] * EPSILON[dtype] for dtype in dtypes)
