"""Whether a server samples from the policy that a trainer trains: `atropos doctor --sampler URL --model DIR`.

    rows/ ──Ask──▶ servers/ ──HTTP──▶ any server: OpenAI completions (vLLM), SGLang's /generate
      │                                     │
      └──▶ reference.py (transformers) ◀──Answer──▶ compared ──▶ report.py: a table, sampler-receipt.json

It needs no trainer of ours and no plugin in the server. Each row is one function in `rows/`, and says what a failure
means for training. `settings.py` loads no torch, so that the launcher can show the flags.
"""
