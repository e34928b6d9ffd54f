"""What vLLM's OpenAI server answers beside its own routes: the bridge, /generate, and 503 while it must not serve."""
