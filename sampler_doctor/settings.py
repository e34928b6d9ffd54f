"""The flags of the sampler doctor; `atropos doctor` shows them beside its own. Loads no torch."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from atroposlib.config import Config, OutputFile


class SamplerFlags(Config):
    """What is checked at a sampler."""

    rows: tuple[str, ...] = Field((), description="for --sampler: the checks to run, comma-separated; by default all")
    quick: bool = Field(False, description="for --sampler: only the twelve checks that find most")
    sampler_dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="for --sampler: dtype in which the server computes, which sets how much rounding may explain; auto"
        " is the finest that explains the first differences",
    )
    protocol: Literal["auto", "completions", "generate"] = Field(
        "auto", description="for --sampler: OpenAI's /v1/completions or SGLang's /generate; auto asks the server"
    )
    served_name: str | None = Field(
        None, min_length=1, description="for --sampler: the model's name at the server; by default its first"
    )
    adapter: str | None = Field(
        None,
        pattern=r"^[^=]+=.+$",
        description="for --sampler: NAME=DIR, a LoRA adapter that the server offers by NAME and its PEFT directory",
    )
    update: str | None = Field(
        None,
        min_length=1,
        description="for --sampler: a directory with other weights of this model; the doctor has the server load it and"
        " runs every row again. This changes what the server serves",
    )
    after: str | None = Field(
        None,
        min_length=1,
        description="for --sampler: a shell command that updates the server's weights, run in place of the server's own"
        " route between two passes of all rows; --update names the weights that it loads",
    )
    receipt: OutputFile = Field(
        Path("sampler-receipt.json"),
        description="for --sampler: JSON file with versions, the model's digest and all rows",
    )
    answer_s: float = Field(120.0, gt=0, le=3600, description="for --sampler: seconds for each of its answers")


class SamplerConfig(SamplerFlags):
    """Check whether a server samples from the policy that a trainer trains."""

    sampler: str = Field(min_length=1, pattern=r"^https?://", description="the server: http://HOST:PORT")
    model: str = Field(min_length=1, description="what it serves: a local directory or a Hugging Face id")
    api_key: SecretStr | None = Field(
        None, description="the server's key, sent as bearer token", json_schema_extra={"env": "VLLM_API_KEY"}
    )
