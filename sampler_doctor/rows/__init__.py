"""The rows of the table: each is one function over a `Session` that returns what it found."""
