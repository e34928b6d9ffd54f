"""The code that runs inside vLLM's processes. Its messages to a trainer are in atroposlib/wire/bridge.py.

endpoint.py, plugin.py   what vLLM loads: in its API server, in each of its processes
worker.py      BridgeWorker, AdapterWorker (--worker-cls): arena and updater thread, or adapters
compat         with worker.py the only place that knows where things are in each supported vLLM version
engines/       how weights arrive, one class per mode; the session; the WeightUpdater_TP{r} thread
memory/        vLLM's fused, sharded parameters as flat buffers: one live, one staging; memory that two processes share
kv_cache/      what vLLM's KV cache keeps over a sync, and what it saves
sampling/      how a token is drawn, and what top-k and top-p keep: the trainer's too
http/          /v1/bridge/*, /generate, and 503 with the reason while the weights must not be served
transport.py   process groups over which weight bytes travel: Gloo, NCCL
delta.py       weights as what has changed in them, for slow links
batch_invariant/   the arithmetic that sampler and trainer share
"""
