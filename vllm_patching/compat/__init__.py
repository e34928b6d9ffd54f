"""The one directory that knows where things are in vLLM 0.26 to 0.33. Loaded inside vLLM's processes, and by a
bit-exact trainer on CUDA.

vllm_engine     the engine and its workers
vllm_layers     layers, and what they multiply by on CPUs
vllm_ops        its C++ kernels alone
vllm_kernels    what a batch-invariant vLLM computes with in place of its own
vllm_requests   sampling parameters and structured outputs, checked
vllm_server     arguments, keys, adapters, tokenizers, and the server itself
vllm_flags      the names of its flags, for a plan that must not load it

Everything else in this package but worker.py imports vLLM through here, so that a new vLLM release is one diff.
"""
