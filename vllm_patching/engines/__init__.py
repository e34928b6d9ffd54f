"""The server's side of each bridge mode."""
