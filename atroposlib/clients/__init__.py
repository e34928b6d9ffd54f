"""How a process talks to its peers: the batching API's client, waiting for a peer, heartbeats."""
