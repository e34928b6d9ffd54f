"""The types of vLLM's objects, for the reader and for tests/contract, which looks up every use of them in each
supported release.

To mypy and at run time they are `Any`: their homes move from release to release, and tests hand in fakes.
"""

from typing import Annotated, Any

AttentionMetadata = Annotated[Any, "vllm.v1.attention.backend.CommonAttentionMetadata"]
Arguments = Annotated[Any, "vllm.entrypoints.cli.serve.make_arg_parser"]  # the namespace that it parses into
CompletionOutput = Annotated[Any, "vllm.outputs.CompletionOutput"]
EngineClient = Annotated[Any, "vllm.v1.engine.async_llm.AsyncLLM"]
EngineProcess = Annotated[Any, "vllm.v1.engine.core.EngineCoreProc"]
Experts = Annotated[Any, "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts"]
EngineRequest = Annotated[Any, "vllm.v1.engine.EngineCoreRequest"]
Grammar = Annotated[Any, "vllm.v1.structured_output.backend_xgrammar.XgrammarGrammar"]
LoRARequest = Annotated[Any, "vllm.lora.request.LoRARequest"]
OfflineEngine = Annotated[Any, "vllm.entrypoints.llm.LLM"]
ModelConfig = Annotated[Any, "vllm.config.ModelConfig"]
ModelRunner = Annotated[Any, "vllm.v1.worker.gpu_model_runner.GPUModelRunner"]
ModelRunnerOutput = Annotated[Any, "vllm.v1.outputs.ModelRunnerOutput"]
RequestOutput = Annotated[Any, "vllm.outputs.RequestOutput"]
RMSNorm = Annotated[Any, "vllm.model_executor.layers.layernorm.RMSNorm"]
RotaryEmbedding = Annotated[Any, "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding"]
RoutingConnector = Annotated[Any, "vllm.distributed.aux_output_connector.worker.AuxOutputWorkerConnector"]
SamplingParams = Annotated[Any, "vllm.sampling_params.SamplingParams"]
SchedulerOutput = Annotated[Any, "vllm.v1.core.sched.output.SchedulerOutput"]
ServedModels = Annotated[Any, "vllm.entrypoints.openai.models.serving.OpenAIServingModels"]
UnquantizedExperts = Annotated[
    Any, "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod"
]
VllmConfig = Annotated[Any, "vllm.config.VllmConfig"]
WorkerClass = Annotated[type, "vllm.v1.worker.gpu_worker.Worker"]
