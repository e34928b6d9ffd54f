"""Commands of the archived ancestor, one module each: atropos-sft-gen, atropos-dpo-gen, view-run, the proxy of
conversations, the watcher of inference nodes. They import the platform, and nothing imports them.
"""
