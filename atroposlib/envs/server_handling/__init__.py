"""Inference clients of environments: configuration, routing over several servers, and token-exact bookkeeping.

environment ──▶ ServerManager ──▶ APIServer (OpenAIServer, VLLMServer, ServerHarness) ──HTTP──▶ inference server
            └─▶ ManagedServer ──▶ (through the manager, sticky to one server) keeps token ids and log-probabilities
"""
