"""Command-line entry points, one module a command."""
