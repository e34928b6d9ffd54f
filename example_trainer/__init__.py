"""The GRPO trainer process, its weight bridges, and the launcher of the vLLM server."""
