"""The trainer's configuration: every flag of `example_trainer/grpo.py`, its bounds and its default, by section of
`--help`. The weight bridge modes and their own settings are in bridges.py.

Filled by `atroposlib.config.load_config` from flags, a YAML file and environment variables before a socket or a
device is touched. This module imports neither torch nor vLLM, so that launchers can read it cheaply.
"""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, Field, SecretStr, ValidationInfo, field_validator, model_validator

from atroposlib.config import Config, Name, OutputFile, in_place
from atroposlib.row_files.kept_rows import DEFAULT, KeepText
from example_trainer.settings.bridges import AnyBridge, Mode, choose
from example_trainer.settings.cpu_cores import parse_cores, shown_cores
from example_trainer.settings.loss import LossSettings
from example_trainer.settings.offline import OfflineSettings
from example_trainer.settings.ranks import RankSettings
from example_trainer.settings.servers import VllmServers

M = TypeVar("M", bound=Mode)

MICRO_BATCH_TOKENS, LOGITS_CHUNK_MB = 2048, 128
Kernels = Literal["torch", "onednn", "bfloat16"]  # model/cpu_kernels.py


# Values of settings that do not go with a trainer that computes as vLLM does, and why.
DECIDED_BY_VLLM = {
    "compute_dtype": (("bfloat16",), "computes in the dtype that vLLM serves"),
    "kernels": (("onednn", "bfloat16"), "computes with vLLM's kernels"),
    "offload": (("moments", "all"), "keeps weights and moments on its device"),
}


class ModelSettings(Config):
    """Model"""

    model_name: str = Field(
        min_length=1,
        validation_alias=AliasChoices("model_name", "model"),
        description="Hugging Face model id or local directory; --model is the same flag",
    )
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto uses a GPU if there is one")
    dtype: Literal["float32"] = Field(
        "float32",
        description=(
            "dtype of the master weights; bfloat16 loses most updates at RL learning rates. The bridge casts to the "
            "dtype that vLLM serves"
        ),
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of the trainer; 0 keeps PyTorch's default")
    cores: str | None = Field(
        None,
        description=(
            "CPU cores to run on, such as 0-3,8; the ranks on a machine share them out evenly, one thread per core."
            " Default: all that the process may use"
        ),
    )
    kernels: Literal["auto", Kernels] = Field(
        "auto",
        description=(
            "kernels of matrix products on a CPU: torch (PyTorch's own, MKL on x86), onednn, or bfloat16 (oneDNN on"
            " factors rounded to bfloat16; sums and weights stay float32). auto takes those of the checkpoint, else the"
            " fastest, timed once per machine and model; it times bfloat16 only if vLLM computes in it"
        ),
    )
    kernel_cache: Path = Field(
        Path("~/.cache/atropos/kernels.json"), description="file that keeps what --kernels auto has measured"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, about a third more time"
    )

    @field_validator("cores")
    @classmethod
    def _cores_are_named(cls, value: str | None) -> str | None:
        return None if value is None else shown_cores(parse_cores(value))


class OptimizationSettings(Config):
    """Optimization"""

    training_steps: int = Field(10, ge=1, description="total training steps, including those before a resume")
    batch_size: int = Field(2, ge=1, description="rollouts per accumulation slot")
    gradient_accumulation_steps: int = Field(
        32,
        ge=1,
        description=(
            "slots per step: a step trains on batch_size x gradient_accumulation_steps rollouts, independent of "
            "micro-batches"
        ),
    )
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description=(
            "tokens packed into one forward pass, shared ones counted once. A longer sequence goes alone; where "
            "prefixes are shared, others join it, up to a quarter more tokens than it has (default: 2048; on a GPU up "
            "to 16384, as many as fit)"
        ),
    )
    share_prefixes: bool | None = Field(
        None,
        description=(
            "compute what sequences of a micro-batch begin with once, such as a group's prompt: the same gradients up "
            "to rounding, in less time. no computes each sequence whole (default: as the checkpoint's run, else yes)"
        ),
    )
    logits_chunk_mb: int | None = Field(
        None,
        ge=1,
        description=(
            "MiB of float32 logits alive at once; bounds the memory of large vocabularies (default: 128; on a GPU 1024 "
            "where that fits)"
        ),
    )
    seq_len: int = Field(
        2048, ge=2, description="longest sequence in tokens; longer ones lose their end, and are counted"
    )
    lr: float = Field(1e-5, ge=0, lt=1, description="learning rate after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimizer updates of linear warm-up, constant after")
    lr_decay_steps: int = Field(
        0,
        ge=0,
        description=(
            "number of last training steps over which the rate falls linearly towards 0; 1/3 is a third of "
            "--training-steps, rounded down"
        ),
    )
    lr_by_signal: bool = Field(
        False,
        description=(
            "multiply the rate of a step by the share of its groups whose scores differ; otherwise AdamW moves the "
            "weights nearly as far for one such group as for all"
        ),
    )
    ema_decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "decay per optimizer update of an exponential moving average of the weights, which the last step puts in"
            " their place; takes 4 bytes per trained weight. 0 keeps none"
        ),
    )
    optimizer: Literal["adamw", "adafactor", "adamw_8bit"] = Field(
        "adamw", description="adamw is PyTorch's fused AdamW on float32 states"
    )
    adam_betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="AdamW's betas"
    )
    adam_eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this L2 norm")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the trainer's generators")

    @field_validator("lr_decay_steps", mode="before")
    @classmethod
    def _share_is_counted(cls, value: object, info: ValidationInfo) -> object:
        share = re.fullmatch(r"(\d{1,9})/([1-9]\d{0,8})", value) if isinstance(value, str) else None
        steps = info.data.get("training_steps")  # not there where it is wrong itself
        return steps * int(share[1]) // int(share[2]) if share and steps else value

    @field_validator("optimizer")
    @classmethod
    def _optimizer_is_here(cls, value: str) -> str:
        if value == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError(
                "adamw_8bit needs the package bitsandbytes (GPU only), which is not installed; use adamw or adafactor"
            )
        return value


class UpdateSettings(Config):
    """Updates"""

    updates_per_batch: int = Field(1, ge=1, description="mini-batches per batch; each one makes an optimizer update")
    epochs: int = Field(1, ge=1, description="times that a batch is trained on before the weights are synced")
    old_logprobs: Literal["auto", "sampler", "recomputed"] = Field(
        "auto",
        description=(
            "old policy of the probability ratios: the sampler's log-probabilities (sampler), or the trainer's own "
            "before the batch's first update (recomputed), which takes one more forward pass. auto is recomputed if "
            "a batch makes several updates, else sampler"
        ),
    )

    overlap: bool = Field(
        False,
        description=(
            "compute gradients of groups while others of their batch are still sampled, where a batch makes one update "
            "from the sampler's log-probabilities; the launcher turns it on where vLLM and trainer do not share devices"
        ),
    )
    routing_replay: Literal["auto", "off", "required"] = Field(
        "auto",
        description=(
            "experts of a mixture-of-experts model: those that vLLM read each token with, where groups have them "
            "(auto), the trainer's own choice (off), or vLLM's, and groups without them are refused (required)"
        ),
    )

    @field_validator("old_logprobs")
    @classmethod
    def _several_updates_recompute(cls, value: str, info: ValidationInfo) -> str:
        if value != "auto":
            return value
        several = info.data.get("updates_per_batch", 1) > 1 or info.data.get("epochs", 1) > 1
        return "recomputed" if several else "sampler"


class BadDataSettings(Config):
    """Bad data"""

    max_rejected_groups: int = Field(
        32, ge=0, le=100, description="how many of the last 100 groups may be untrainable; more end the run"
    )
    on_bad_batch: Literal["skip", "stop"] = Field(
        "skip",
        description=(
            "what to do with a batch whose gradient or loss is not finite, or that exceeds --mismatch-limit: skip "
            "it and continue, or stop the run. The weights do not change either way"
        ),
    )
    max_bad_batches: int = Field(3, ge=0, description="bad batches in a row that are skipped; one more ends the run")


class ExactnessSettings(Config):
    """Exactness"""

    batch_invariant: bool = Field(
        False,
        description=(
            "compute what a vLLM server started with --batch-invariant computes, bit for bit, and check it each step"
        ),
    )
    deterministic: bool = Field(
        False,
        description=(
            "train on the groups of a batch in their order, with sums that depend neither on cores nor on"
            " --micro-batch-tokens, so that the run can be repeated bit for bit; needs --batch-invariant, and"
            " environments with --env.deterministic"
        ),
    )
    bit_exact: Literal["report", "strict"] = Field(
        "report",
        description="strict ends the run at the first step with a differing token, and keeps its batch for replay",
    )
    mismatch_limit: float = Field(
        5.0,
        gt=0,
        description=(
            "nats by which the sampler's log-probabilities may differ from the trainer's, on average over a step"
        ),
    )


class ApiSettings(Config):
    """Batching API"""

    atropos_url: str = Field("http://localhost:8000", pattern=r"^https?://.+", description="the batching API")
    atropos_token: SecretStr | None = Field(
        None, description="the API's token", json_schema_extra={"env": "ATROPOS_API_TOKEN"}
    )
    ack_after: Literal["checkpoint", "step"] = Field(
        "checkpoint",
        description=(
            "when to acknowledge a batch: after the checkpoint that contains its step, so that a resumed run gets "
            "the batch again, or after its step. Without checkpoints there is no difference"
        ),
    )
    api_timeout: float = Field(120.0, gt=0, description="seconds to wait for the batching API to start or to come back")
    fetch_timeout: float = Field(1800.0, gt=0, description="seconds to wait for one batch")
    eval_deadline: float = Field(
        300.0, ge=0, description="seconds to wait for announced evaluations of a policy; 0 never waits"
    )


class SyncSettings(Config):
    """Weight sync"""

    vllm_start_timeout: float = Field(900.0, gt=0, description="seconds to wait for the vLLM server to start")
    vllm_return_s: float = Field(
        0.0,
        ge=0,
        le=86400,
        description=(
            "seconds to wait for a vLLM server that died to be started again, which then gets the current policy; 0"
            " ends training at once (atropos train sets it)"
        ),
    )
    bridge_timeout_s: float = Field(120.0, gt=0, le=3600, description="seconds that the bridge waits for a peer")
    probe_every: int = Field(
        10,
        ge=0,
        description=(
            "steps between two proofs that vLLM samples from the policy that was trained: it answers four prompts, and"
            " the distributions are compared. The first two policies are always proven; 0: no other"
        ),
    )
    parity_tolerance: float | None = Field(
        None,
        gt=0,
        description=(
            "allowed root mean square difference, in nats, between vLLM's and the trainer's log-probabilities in these"
            " proofs; by default what rounding explains, from the dtypes and the model's own spread"
        ),
    )
    bridge: AnyBridge = Field(description="how new weights reach vLLM; `modes.choose` fills it in")


class OutputSettings(Config):
    """Checkpoints and metrics"""

    save_path: Path = Field(
        Path("trained_model_checkpoints"), description="directory of step_N/, final_model/, best_model/ and `latest`"
    )
    checkpoint_interval: int = Field(3, ge=0, description="steps between checkpoints; 0 writes only final_model/")
    checkpoint_format: Literal["auto", "hf", "sharded"] = Field(
        "auto",
        description=(
            "format of step_N/: hf is a Hugging Face directory, written while training waits; sharded is one part "
            "per rank, written while training continues. auto is hf for a model below 3e9 parameters on one rank, "
            "and for adapters"
        ),
    )
    keep_checkpoints: int = Field(2, ge=0, description="number of newest step_N/ directories to keep; 0 keeps all")
    keep_best: int = Field(
        1,
        ge=0,
        description=(
            "number of policies with the best held-out accuracy to keep, as best_model_VERSION/ or "
            "best_adapter_VERSION/; the link best_model names the best of them; 0 keeps none"
        ),
    )
    stop_when_flat: int = Field(
        0,
        ge=0,
        description=(
            "end the run one step after so many evaluations in a row without a higher accuracy; 0 does all"
            " --training-steps"
        ),
    )
    resume: str | None = Field(
        None,
        min_length=1,
        description="a checkpoint directory; `latest` in save_path; `auto`: latest, or a fresh start",
    )
    log_dir: Path = Field(Path("logs"), description="directory of metrics.jsonl and TensorBoard files")
    metrics_path: OutputFile | None = Field(
        None, description="metrics file, one JSON object per step; default LOG_DIR/metrics.jsonl"
    )
    save_trained: bool = Field(
        True,
        description=(
            "write the advantages and log-probabilities of every group of a step, about 20 bytes per trained token, for"
            " people who look into samples"
        ),
    )
    trained_path: OutputFile | None = Field(
        None, description="file for them, one JSON object per group; default LOG_DIR/trained.jsonl"
    )
    keep_samples: KeepText = Field(
        DEFAULT,
        description=(
            "how much of trained.jsonl is kept: bytes (20GB), steps (200steps) or all; older parts are compressed, and"
            " then removed"
        ),
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="serve Prometheus metrics at http://127.0.0.1:PORT/metrics; 0 serves none"
    )
    use_wandb: bool = Field(
        False, validation_alias=AliasChoices("use_wandb", "wandb"), description="log to Weights & Biases"
    )
    wandb_project: Name = Field(
        "atropos", min_length=1, description="Weights & Biases project, used by environments too"
    )
    wandb_group: Name | None = Field(None, description="Weights & Biases group, used by environments too")
    tensorboard: bool = Field(False, description="log to TensorBoard under LOG_DIR")
    samples_interval: int = Field(
        10, ge=0, description="steps between tables of sampled answers in wandb and TensorBoard; 0 writes none"
    )

    @property
    def metrics_file(self) -> Path:
        """Return where the metrics rows go."""
        return self.metrics_path or self.log_dir / "metrics.jsonl"

    @property
    def trained_file(self) -> Path:
        """Return where the rows of trained groups go."""
        return self.trained_path or self.log_dir / "trained.jsonl"


class TrainerConfig(
    # pydantic lists the fields of the last class first
    OutputSettings,
    SyncSettings,
    VllmServers,
    ApiSettings,
    ExactnessSettings,
    BadDataSettings,
    OfflineSettings,
    LossSettings,
    UpdateSettings,
    OptimizationSettings,
    RankSettings,
    ModelSettings,
):
    """Train with GRPO on batches from the batching API, and hand new weights to vLLM after every step."""

    first_flags: ClassVar[Sequence[str]] = (
        "model_name",
        "training_steps",
        "lr",
        "batch_size",
        "gradient_accumulation_steps",
        "seq_len",
        "algorithm",
        "kl_coef",
        "checkpoint_interval",
    )

    @property
    def shares_prefixes(self) -> bool:
        """Return whether prefixes are shared, unless a checkpoint says otherwise."""
        return self.share_prefixes is not False

    @property
    def pass_tokens(self) -> int:
        """Tokens of a micro-batch, unless the memory plan finds room for more. Gradients are added up by micro-batch,
        so these are always as many in a run that can be repeated.
        """
        if self.deterministic:
            return max(self.seq_len, MICRO_BATCH_TOKENS)
        return self.micro_batch_tokens or MICRO_BATCH_TOKENS

    @property
    def logits_mb(self) -> int:
        """MiB of logits alive at once, unless the memory plan finds room for more."""
        return LOGITS_CHUNK_MB if self.deterministic else self.logits_chunk_mb or LOGITS_CHUNK_MB

    @property
    def offline_examples(self) -> int:
        """Return how many offline examples an update trains on: their share, where it has a rollout for each of the
        others.
        """
        rollouts = self.batch_size * self.gradient_accumulation_steps / self.updates_per_batch
        return max(1, round(rollouts * (1 if self.offline_alone else self.offline_share / (1 - self.offline_share))))

    @property
    def updates_per_step(self) -> int:
        """Return how many optimizer updates a step makes, if its batch teaches something."""
        return self.updates_per_batch * self.epochs

    @property
    def overlaps(self) -> bool:
        """Return whether gradients may be computed before their batch is whole."""
        return self.overlap and self.updates_per_batch == self.epochs == 1 and self.old_logprobs == "sampler"

    @property
    def needs_sampler_logprobs(self) -> bool:
        """Return whether a group without the sampler's log-probabilities cannot be trained on."""
        corrected = self.importance != "none" or self.off_policy_mask > 0
        return self.old_logprobs == "sampler" or corrected or self.batch_invariant

    @property
    def follows_vllm(self) -> str | None:
        """Name what makes the trainer compute as vLLM does: in its dtype, by its kernels, on its device."""
        return "--batch-invariant" if self.batch_invariant else "a single copy" if self.bridge.same_devices else None

    @property
    def keeps_tensors_whole(self) -> bool:
        """Return whether neither sharding, offloading nor bfloat16 may be chosen for the run."""
        return self.follows_vllm is not None or self.optimizer != "adamw"

    def mode(self, kind: type[M]) -> M:
        """The settings of the bridge, for the code of that mode."""
        assert isinstance(self.bridge, kind), f"the bridge is {self.bridge.kind}"
        return self.bridge

    @model_validator(mode="before")
    @classmethod
    def _flags_choose_the_bridge(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        # the guide's flags for a mode stand at the top; they go down into `bridge`
        bridge = values.get("bridge")
        given = {"bridge": bridge.model_dump()} if isinstance(bridge, BaseModel) else {}
        placed = in_place({**values, **given}, cls)
        placed["bridge"] = choose(placed.get("bridge", {}))
        return placed

    @model_validator(mode="after")
    def _servers_are_named(self) -> "TrainerConfig":
        if not self.vllm_servers:
            raise ValueError("--vllm-port names no port: give one, or several with commas")
        return self

    @model_validator(mode="after")
    def _every_update_has_a_rollout(self) -> "TrainerConfig":
        rollouts = self.batch_size * self.gradient_accumulation_steps
        if self.updates_per_batch > rollouts:
            raise ValueError(
                f"--updates-per-batch {self.updates_per_batch}: a batch has {rollouts} rollouts (--batch-size x"
                " --gradient-accumulation-steps); give at most as many updates"
            )
        return self

    @model_validator(mode="after")
    def _truncates_the_ratio_in_the_loss(self) -> "TrainerConfig":
        if self.importance != "truncate" or self.old_logprobs == "recomputed":
            return self
        if (self.objective, self.ratio) != ("clip", "token" if self.importance_level == "token" else "sequence_sum"):
            raise ValueError(
                f"--importance truncate, --importance-level {self.importance_level}: with --old-logprobs sampler it"
                f" bounds the ratio in the loss, which --objective {self.objective} has per {self.ratio}. Give"
                " --old-logprobs recomputed, or --importance mask; or --objective clip with the levels token and"
                " --ratio token, or sequence and sequence_sum"
            )
        return self

    @model_validator(mode="after")
    def _can_be_repeated(self) -> "TrainerConfig":
        if not self.deterministic:
            return self
        if not self.batch_invariant:
            raise ValueError(
                "--deterministic needs --batch-invariant, here and on the vLLM server: without it the sampler's answers"
                " depend on what else it samples"
            )
        if self.overlap:
            raise ValueError(
                "--overlap adds up the gradients of groups in the order in which they arrive: drop it, or"
                " --deterministic"
            )
        if self.logits_chunk_mb:
            raise ValueError(
                f"--logits-chunk-mb {self.logits_chunk_mb}: with --deterministic it is {LOGITS_CHUNK_MB}; drop one of"
                " them"
            )
        return self

    @model_validator(mode="after")
    def _strict_is_about_exactness(self) -> "TrainerConfig":
        if self.bit_exact == "strict" and not self.batch_invariant:
            raise ValueError(
                "--bit-exact strict needs --batch-invariant, here and on the vLLM server: without it every batch"
                " differs"
            )
        if self.batch_invariant and self.bridge.never_exact:
            raise ValueError(self.bridge.never_exact)
        return self

    @model_validator(mode="after")
    def _vllm_decides_how_to_compute(self) -> "TrainerConfig":
        for name, (values, reason) in DECIDED_BY_VLLM.items():
            if self.follows_vllm and (value := getattr(self, name)) in values:
                flag = f"--{name.replace('_', '-')} {value}"
                raise ValueError(f"{flag}: {self.follows_vllm} {reason}; drop one of them")
        return self
