"""How a token is drawn from logits. Pure torch: the trainer computes the distribution that the sampler drew from.

truncation.py   which tokens top-k and top-p keep
draws.py        in a worker on a CPU: a token of each row by inverse transform sampling
"""
