"""Environments and tools that others wrote, in their protocols: OpenEnv, verifiers, MCP.

Imports failures, rollouts, tools and server_handling.
"""
