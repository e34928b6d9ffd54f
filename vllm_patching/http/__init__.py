"""What we add to vLLM's OpenAI server: the bridge's routes, /generate, and 503 while it must not serve."""
