"""All that runs inside vLLM's processes. What it says to a trainer is in atroposlib/wire/bridge.py.

transport.py  process groups over which weight bytes travel: Gloo, NCCL
compat.py     the one file that knows where things are in each supported vLLM version
mapping.py    vLLM's fused, sharded parameters <-> Hugging Face tensors
arena.py      every parameter of a rank in one flat buffer: one live, one staging
updater.py    the WeightUpdater_TP{r} thread: receives into staging, never writes live parameters
shared_buffer.py, cuda_ipc.py   memory that trainer and worker share: memfd, CUDA IPC
worker.py     BridgeWorker (--worker-cls): owns arena and updater, applies a staged version
bridge_state.py  the one session, commit; single_copy.py  attach, pause, resume and the watch over a paused trainer
engine_watch.py  503 with the reason while the engine process does not answer
gate.py       503 with the reason while the weights must not be served
adapters.py   LoRA: the adapter that is served, and who may change it; adapter_routes.py, adapter_worker.py,
              adapter_rows.py
endpoint.py   /v1/bridge/* and /generate inside vLLM's own OpenAI server
"""
