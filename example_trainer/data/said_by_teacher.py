"""What a group's teacher said of the tokens of a sequence, as arrays. Pure functions on checked groups."""

import numpy as np
from numpy.typing import NDArray

from atroposlib.groups import MIN_LOGPROB
from atroposlib.wire.batching import ScoredData


def said_by_teacher(
    group: ScoredData, index: int, seq_len: int, top_k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids and log-probabilities of the tokens that the teacher names at each position, [length, top_k + 1]: the token
    of the sequence first. Where it names fewer, that token fills the row, with a probability of 0.
    """
    tokens = np.asarray(group.tokens[index][:seq_len], np.int64)
    ids = np.repeat(tokens[:, None], top_k + 1, 1)
    logprobs = np.full(ids.shape, MIN_LOGPROB, np.float32)
    assert group.distill_token_ids is not None
    assert group.distill_logprobs is not None
    named = zip(group.distill_token_ids[index], group.distill_logprobs[index], strict=True)
    for place, (its, theirs) in zip(range(len(tokens)), named, strict=False):
        count = min(len(its), top_k + 1)
        ids[place, :count] = its[:count]
        logprobs[place, :count] = theirs[:count]
    return ids, logprobs
