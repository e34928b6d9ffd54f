"""How long something may take, and what is waited for. Imports errors alone."""
