"""The teacher of a run: `teacher` in a run file.

    teacher: {model: Qwen/Qwen2.5-7B-Instruct, max_model_len: 1024}   started beside, with flags of vLLM
    teacher: {url: http://gpu-7:9002}                                 one that is there

The environments ask it, and the trainer learns from it with `distill_coef`.
"""

from pydantic import ConfigDict, Field, model_validator

from atropos_launcher.run_file.servers import Tree, as_planned
from atroposlib.config import Config

TEACHER = "teacher"  # its section, service and log


class TeacherSection(Config):
    """One teacher: a model, and flags of the vLLM server that is started for it, or the address of a server."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(
        None, min_length=1, description="Hugging Face id or local directory, such as a checkpoint, to serve beside"
    )
    url: str | None = Field(
        None, pattern=r"^https?://[^\s/]+(/v1)?/?$", description="address of a vLLM server that serves the teacher"
    )
    tokenizer_name: str | None = Field(None, min_length=1, description="its tokenizer; by default the model's")
    api_key_env: str | None = Field(None, min_length=1, description="variable with the key of the server at `url`")

    @model_validator(mode="after")
    def _one_of_two(self) -> "TeacherSection":
        if (self.model is None) == (self.url is None):
            raise ValueError("give `model`, to start its server, or `url`, of one that runs: one of the two")
        if self.url is not None and self.flags:
            raise ValueError(
                f"{', '.join(self.flags)}: flags of vLLM are for a teacher that is started; drop them, or give `model`"
                " in place of `url`"
            )
        return self

    @property
    def flags(self) -> Tree:
        """The flags of its vLLM server."""
        return as_planned(
            {key: value for key, value in (self.model_extra or {}).items() if value is not None}, "teacher"
        )

    @property
    def ranks(self) -> int:
        """How many GPUs it takes."""
        return int(self.flags.get("tensor_parallel_size") or 1)
