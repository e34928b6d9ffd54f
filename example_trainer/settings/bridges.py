"""The weight bridge modes: one class per mode, with its settings, its flags, and what it needs.

`TrainerConfig.bridge` is one of these classes, selected by `kind`. The guide's flags are translated to it:

    --weight-bridge-mode shared_vllm --use-shared-memory --bridge-bucket-mb 8     what people type
    bridge: {kind: broadcast, bucket_mb: 8}                                       what it resolves to

An alias of a field below is its flag (`--bridge-bucket-mb`, and the key of that name in YAML). A new mode is a class
here, listed in `Bridge`. Doctor, launchers and benchmarks take the modes and their needs from `MODES`. This module
imports neither torch nor vLLM.
"""

import shlex
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, SecretStr, TypeAdapter, ValidationError, field_validator, model_validator

from atroposlib.config import Ambient, Config
from atroposlib.flags import Hoisted
from atroposlib.wire.bridge import NCCL_BUCKET

SECRETS = {"api_key": "VLLM_API_KEY", "hf_token": "HF_TOKEN"}  # vLLM's flags, and the variables that it reads instead
SWITCHES = ("use_shared_memory", "single_copy")  # which of the two shared_vllm modes


class Mode(Config, Hoisted):
    """Weight bridge"""

    typed: ClassVar[str]  # what follows --weight-bridge-mode
    feeds_several: ClassVar[bool] = False  # vLLM servers at once
    vllm_copies: ClassVar[int] = 1  # of the weights in vLLM, in the dtype that it serves
    packed_copies: ClassVar[int] = 0  # of the weights, which vLLM multiplies by on CPUs
    same_devices: ClassVar[bool] = False  # trainer and vLLM on the same GPUs
    switched: ClassVar[bool] = False  # the server must run with VLLM_ENABLE_SHARED_WEIGHTS=1
    owns_vllm: ClassVar[bool] = False  # the trainer starts it
    survives_vllm: ClassVar[bool] = False  # a vLLM that was started again gets the weights from the trainer
    external: ClassVar[bool] = False  # the server is not vLLM, and people start it themselves
    adapters: ClassVar[bool] = False  # the server must run with --enable-lora, and in no other mode
    trains_adapter: ClassVar[bool] = False  # the model's own weights stay
    written_copies: ClassVar[int] = 0  # of the trained weights on disk, by which vLLM gets them
    several_ranks: ClassVar[bool] = True  # of the trainer
    never_exact: ClassVar[str] = ""  # why --batch-invariant does not cover it

    kind: str = Field(
        "restart",
        validation_alias="weight_bridge_mode",
        description="how new weights reach vLLM: none, reload, shared_vllm (with one of the two switches), lora_only,"
        " lora_restart or sglang; as bridge.kind: one of the kinds that the sections below name",
    )

    @classmethod
    def shown(cls) -> str:
        """For a message: its kind, and what people type for it."""
        return f"{cls.model_fields['kind'].default} (--weight-bridge-mode {cls.typed})"


class _Session(Mode):
    """Weight bridge: modes that hold a session with a running vLLM"""

    lease_s: float = Field(
        30.0,
        gt=0,
        le=300,
        validation_alias="bridge_lease_s",
        description="seconds without a sign of life after which another trainer may take the bridge",
    )


class Grouped(Mode):
    """Weight bridge: modes whose weights travel through a process group of the trainer and the servers' workers"""

    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto",
        validation_alias="bridge_backend",
        description=(
            "transport of the weights; auto is nccl for a trainer on a GPU, but gloo to a vLLM with --batch-invariant."
            " Use gloo if trainer and vLLM share one GPU"
        ),
    )
    bucket_mb: int | Literal["auto"] = Field(
        "auto",
        validation_alias="bridge_bucket_mb",
        description="MiB per packed bucket of a broadcast; auto is 256 over nccl and 16 over gloo",
    )
    master_addr: str = Field(
        "localhost",
        min_length=1,
        validation_alias="master_addr",
        description="address at which the servers' workers reach the trainer",
        json_schema_extra={"env": "MASTER_ADDR"},
    )
    master_port: int = Field(
        0,
        ge=0,
        le=65535,
        validation_alias="master_port",
        description="port of --master-addr; 0 takes a free one",
        json_schema_extra={"env": "MASTER_PORT"},
    )

    @field_validator("bucket_mb", mode="after")
    @classmethod
    def _bucket_is_bounded(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= 4096:
            raise ValueError("give 1 to 4096 MiB, or auto")
        return value

    def bucket_bytes(self, backend: str) -> int:
        """Bytes of a bucket: more over NCCL, where 72 billion weights would else be thousands of messages."""
        if self.bucket_mb == "auto":
            return NCCL_BUCKET if backend == "nccl" else 16 << 20
        return self.bucket_mb << 20


class Broadcast(_Session, Grouped):
    """Weight bridge: broadcast (shared_vllm --use-shared-memory)"""

    typed = "shared_vllm --use-shared-memory"
    feeds_several = True
    survives_vllm = True
    vllm_copies = 2
    packed_copies = 1
    switched = True

    kind: Literal["broadcast"] = "broadcast"
    sends: Literal["auto", "direct", "gathered"] = Field(
        "auto",
        validation_alias="bridge_sends",
        description=(
            "how several trainer ranks send the weights: each sends the rows that it holds (direct), or rank 0 gathers"
            " and sends all (gathered); auto is direct where trainer and servers can, over nccl from at most 8 ranks"
        ),
    )
    use_shared_memory: bool = Field(
        True,
        exclude=True,
        validation_alias="use_shared_memory",
        description="shared_vllm by broadcast to vLLM's weight updater threads",
    )
    delta: bool = Field(
        False,
        validation_alias="bridge_delta",
        description="send only the 16-bit words that have changed, for slow links; the trainer keeps a copy of what it"
        " sent to each server in host memory",
    )

    @model_validator(mode="after")
    def _changes_are_sent_by_one_rank(self) -> "Broadcast":
        if self.delta and self.sends == "direct":
            raise ValueError(
                "--bridge-delta and --bridge-sends direct cannot be combined, because rank 0 alone sends changes: use"
                " --bridge-sends auto or gathered, or drop --bridge-delta"
            )
        return self

    @property
    def sends_by(self) -> str:
        """`sends`, which only rank 0 does with `delta`."""
        return "gathered" if self.delta else self.sends


class SingleCopy(_Session):
    """Weight bridge: single_copy (shared_vllm --single-copy)"""

    typed = "shared_vllm --single-copy"
    same_devices = True
    several_ranks = False
    switched = True

    kind: Literal["single_copy"] = "single_copy"
    single_copy: bool = Field(
        True,
        exclude=True,
        validation_alias="single_copy",
        description="shared_vllm with one copy of the weights",
    )
    bf16_update: Literal["master", "stochastic"] = Field(
        "master",
        validation_alias="bf16_update",
        description=(
            "how bfloat16 weights shared with vLLM receive updates below their precision: through a float32 copy in "
            "the trainer (master), or by stochastic rounding without a copy"
        ),
    )

    @field_validator("bf16_update", mode="before")
    @classmethod
    def _bf16_is_never_stepped_as_it_is(cls, value: object) -> object:
        if value in ("plain", "none"):
            raise ValueError(
                "plain bfloat16 steps do not train: at RL learning rates nearly all of each update is rounded away; "
                "choose master (a float32 copy) or stochastic (rounding by chance)"
            )
        return value


class Reload(_Session):
    """Weight bridge: reload"""

    typed = "reload"
    survives_vllm = True
    vllm_copies = 2
    packed_copies = 1
    switched = True
    written_copies = 2  # the one before is removed once its successor is served

    kind: Literal["reload"] = "reload"


class Sglang(Grouped):
    """Weight bridge: sglang"""

    typed = "sglang"
    feeds_several = True
    external = True
    never_exact = "--batch-invariant covers vLLM, not the servers of mode sglang: choose another mode, or drop the flag"

    kind: Literal["sglang"] = "sglang"
    admin_api_key: SecretStr | None = Field(
        None,
        validation_alias="sglang_admin_api_key",
        description="SGLang's --admin-api-key; --vllm-api-key is its --api-key",
        json_schema_extra={"env": "SGLANG_ADMIN_API_KEY"},
    )
    reset: bool = Field(
        True,
        validation_alias="sglang_reset",
        description=(
            "overwrite SGLang's weights with random ones before the first sync, so that the parity probe sees a tensor"
            " that SGLang does not take"
        ),
    )


class Adapter(Mode):
    """Weight bridge: LoRA adapters (lora_only, lora_restart)"""

    trains_adapter = True
    never_exact = (
        "--batch-invariant does not cover LoRA adapters: choose a mode that trains the whole model, or drop the flag"
    )

    r: int = Field(
        16,
        ge=1,
        le=512,
        validation_alias="lora_r",
        description="rank of the adapter; vLLM's --max-lora-rank must be at least this",
    )
    alpha: int = Field(
        32,
        ge=1,
        validation_alias="lora_alpha",
        description="the adapter's output is scaled by lora_alpha / lora_r",
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        validation_alias="lora_dropout",
        description="dropout before the adapter; vLLM samples without, so above 0 it adds noise to probability ratios",
    )
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        validation_alias="lora_target_modules",
        description="names of the linear layers that get an adapter, comma-separated",
    )


class Lora(Adapter, _Session):
    """Weight bridge: lora (lora_only)"""

    typed = "lora_only"
    survives_vllm = True
    adapters = True

    kind: Literal["lora"] = "lora"


class Restarting(Mode):
    """Weight bridge: restarts of vLLM (none, lora_restart)"""

    owns_vllm = True

    restart_interval: int = Field(
        3,
        ge=1,
        validation_alias="vllm_restart_interval",
        description="policy versions between two restarts of vLLM; the last version is served too",
    )
    vllm_flags: str = Field(
        "",
        validation_alias="vllm_flags",
        description=(
            "additional flags for the vLLM server that the trainer starts, e.g. '--max-model-len 4096 --enforce-eager'"
        ),
    )
    vllm_gpu: str | None = Field(
        None,
        pattern=r"^\d+(,\d+)*$",
        validation_alias="vllm_gpu",
        description=(
            "CUDA_VISIBLE_DEVICES of that server; unset, it shares the trainer's GPU and takes 0.45 of its memory"
        ),
    )

    @field_validator("vllm_flags")
    @classmethod
    def _flags_are_whole(cls, value: str) -> str:
        words = shlex.split(value)  # its ValueError names an open quotation
        for word, following in pairwise([*words, "--"]):
            flag, given, _ = word.partition("=")
            variable = SECRETS.get(flag.removeprefix("--").replace("-", "_"))
            if variable and (given or not following.startswith("--")):  # `--hf-token` alone is the stored login
                raise ValueError(f"{flag}: a run keeps no secrets, and its command lines are read: set {variable}")
        return value


class Restart(Restarting):
    """Weight bridge: restart (none)"""

    typed = "none"
    written_copies = 2

    kind: Literal["restart"] = "restart"


class LoraRestart(Adapter, Restarting):
    """Weight bridge: lora_restart"""

    typed = "lora_restart"

    kind: Literal["lora_restart"] = "lora_restart"


Bridge = Restart | LoraRestart | Broadcast | Lora | SingleCopy | Reload | Sglang
AnyBridge = Annotated[Bridge, Field(discriminator="kind")]
MODES: dict[str, type[Mode]] = {mode.model_fields["kind"].default: mode for mode in get_args(Bridge)}
LAUNCHED = {kind: mode for kind, mode in MODES.items() if not mode.external}  # for what starts or examines vLLM


def choose(values: Mapping[str, object]) -> dict[str, object]:
    """The `bridge` tree of what was typed: the guide's mode and switches become `kind`, and variables of the
    environment that belong to another mode are left out. Raises ValueError for a flag of another mode.
    """
    values = {name: value for name, value in values.items() if name not in SWITCHES or _is_on(name, value)}
    switches = [f"--{name.replace('_', '-')}" for name in SWITCHES if name in values]
    if len(switches) == len(SWITCHES):
        raise ValueError(
            "--use-shared-memory (two copies, broadcast) and --single-copy (one copy) cannot be combined; pick one"
        )
    name = str(values.get("kind", "none"))
    kinds = {mode.typed: kind for kind, mode in MODES.items()} | {kind: kind for kind in MODES}
    chosen = name if name in kinds else " ".join([name, *switches])  # which tell the two modes shared_vllm apart
    if chosen not in kinds:
        raise ValueError(
            f"--weight-bridge-mode {chosen} is not available; choose:"
            f" {', '.join('--weight-bridge-mode ' + mode.typed for mode in MODES.values())}"
        )
    mode = MODES[kinds[chosen]]
    owners = {name: [mode for mode in MODES.values() if name in mode.model_fields] for name in values}
    foreign = [name for name in values if name not in mode.model_fields and owners[name]]
    errors = []
    for name in foreign:
        if not isinstance(values[name], Ambient):
            flag = "--" + str(owners[name][0].model_fields[name].validation_alias).replace("_", "-")
            modes = " and ".join(owner.shown() for owner in owners[name])
            errors.append(
                f"{flag} belongs to {modes}, but the mode is {mode.shown()}: drop {flag}, or choose such a mode"
            )
    if errors:
        raise ValueError("; ".join(errors))
    return {name: value for name, value in values.items() if name not in foreign} | {"kind": kinds[chosen]}


def _is_on(name: str, value: object) -> bool:
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        raise ValueError(f"{name}: expected true or false (got {value!r})") from None
