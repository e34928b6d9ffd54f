"""Files that environments write for people: JSONL records and HTML pages. Imports errors alone."""
