"""The window on a run: a web page over the files of run directories, served by `atropos view`.

    samples.jsonl, trained.jsonl, ...  ──jsonl_index.py──▶ group_files.py: which groups match──┐
    metrics.jsonl, run.json, logs      ──metric_rows.py, run_files.py──────────────────────────┼──▶ replies.py ──▶ page/
    tokenizer.json                     ──token_text.py───▶ group_view.py: one group────────────┘

It reads files and nothing else, so a run that ended, crashed or is still going opens the same way. It writes
nothing but notes.json, the notes that a person keeps of a run.
"""
