"""A fake inference server and tiny tokenizers, for tests of environments, ours and yours."""
