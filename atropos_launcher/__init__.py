"""The launcher of a run, above the trainer's configuration: nothing imports it, and it loads neither torch nor vLLM."""
