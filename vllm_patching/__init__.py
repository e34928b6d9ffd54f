"""All that runs inside vLLM's processes, and the protocol both ends of the weight bridge speak.

protocol.py   manifest, buckets, session, keys and messages (imports neither vLLM nor the trainer)
transport.py  process groups over which weight bytes travel: Gloo, NCCL
compat.py     the one file that knows where things are in each supported vLLM version
mapping.py    vLLM's fused, sharded parameters <-> Hugging Face tensors
arena.py      every parameter of a rank in one flat buffer: one live, one staging
updater.py    the WeightUpdater_TP{r} thread: receives into staging, never writes live parameters
worker.py     BridgeWorker (--worker-cls): owns arena and updater, applies a staged version
endpoint.py   /v1/bridge/* and /generate inside vLLM's own OpenAI server
"""
