"""Batch-invariant arithmetic: the same token in the same context gets the same bits, in vLLM and in the trainer.

Why a batch changes a token's bits, and what to do: He et al. 2025 (Thinking Machines Lab), "Defeating Nondeterminism
in LLM Inference", https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/.

    switch.py     the environment variables that must be set before vLLM is imported, and the checks for them
    coverage.py   which models are exact; all others are refused by name
    kernels.py    linear, norm, silu, rotary table and query tiles as both processes compute them (torch alone)
    attention.py  vLLM's own CPU attention kernel over packed sequences, for the trainer
    cuda.py       vLLM's own functions on CUDA, for the trainer
    hooks.py      makes a vLLM process compute batch-invariantly; loaded only inside vLLM
    self_check.py proves on this machine, at start-up, that the matrix products do not depend on the batch

This module imports nothing, so that a launcher can import switch.py before torch and vLLM are loaded.
"""
