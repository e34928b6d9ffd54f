"""`TeacherDistillationEnv`: adds a teacher model's likeliest tokens at each position to every group.

    accepted group ──tokens──▶ teacher server (prompt log-probabilities)
                               ──▶ distill_token_ids, distill_logprobs [sequence][position][k]

The teacher is another server with its own flags (`--teacher.base_url`, ..., or `teacher:` in YAML). It must have
the student's vocabulary, since ids are compared with ids. At each position the sequence's own token comes first,
then the teacher's likeliest others; nothing precedes the first position, so its lists are empty. If the teacher fails
on a group, the group is sent without them. The trainer of this project does not train on them: where it has registered,
the first group ends the environment with a line that says so.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup, ServerBaseline
from atroposlib.envs.errors import WrongSetting
from atroposlib.envs.run.environment import ServerConfigs
from atroposlib.envs.server_handling.server_config import resolve_openai_configs
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import reading
from atroposlib.flags import Setting
from atroposlib.groups import NOT_TRAINED_ON
from atroposlib.logs import get_logger
from atroposlib.utils.tokenizers import load_tokenizer

log = get_logger(__name__)

TeacherServers = ServerBaseline | Sequence[APIServerConfig] | None


class TeacherDistillationConfig(BaseEnvConfig):
    """A group's `group_overrides` may hold `teacher_top_k`, or `skip_teacher_top_k`, for itself."""

    teacher_enabled: bool = Field(default=False, description="Ask the teacher about every accepted group.")
    teacher_top_k: int = Field(
        default=0,
        ge=-1,
        description=(
            "Likeliest tokens per position, in addition to the sequence's own; 0: only its own, -1: do not ask."
        ),
    )


class TeacherDistillationEnv(BaseEnv):
    """An environment extends this instead of BaseEnv, or beside one that does.

    Raises ValueError when the teacher is enabled and not configured, or has another vocabulary.
    """

    env_config_cls: ClassVar[type[BaseEnvConfig]] = TeacherDistillationConfig
    # The servers of `--teacher.*`, which the command line sets on a class of its own.
    teacher_servers: ClassVar[TeacherServers] = None
    teacher_namespace: ClassVar[str] = "teacher"

    def __init__(
        self,
        config: Any,
        server_configs: ServerConfigs,
        slurm: bool = False,
        testing: bool = False,
        teacher_server_configs: TeacherServers = None,
    ) -> None:
        super().__init__(config, server_configs, slurm=slurm, testing=testing)
        self.teacher_server: ServerManager | None = None
        if not config.teacher_enabled:
            return
        servers = teacher_server_configs or self.teacher_servers
        if servers is None:
            raise ValueError(
                "teacher_enabled, but no teacher server configuration was provided: pass --teacher.base_url and"
                " --teacher.model_name, override teacher_config_init, or pass teacher_server_configs"
            )
        given = [servers] if isinstance(servers, APIServerConfig) else servers
        self.teacher_server = ServerManager(given, slurm=False, testing=False)
        self._validate_teacher_tokenizer_compatibility(
            (given if isinstance(given, ServerBaseline) else given[0]).tokenizer_id
        )

    @classmethod
    def teacher_config_init(cls) -> TeacherServers:
        """The teacher before YAML and flags."""
        return None

    @classmethod
    def _further_servers(cls) -> dict[str, object]:
        return {"teacher": cls.teacher_config_init()}

    @classmethod
    def _resolved_servers(
        cls, name: str, read: object, content: Mapping[str, object], typed: Sequence[Setting]
    ) -> object:
        """The teacher as an override of the ancestor's hook resolves it."""
        hook = cls._resolve_teacher_server_configs.__func__  # type: ignore[attr-defined]
        if name != cls.teacher_namespace or hook is TeacherDistillationEnv._resolve_teacher_server_configs.__func__:  # type: ignore[attr-defined]
            return read
        flags = {f"{name}.{flag.name}": True if flag.text is None else flag.text for flag in typed}
        return cls._resolve_teacher_server_configs(cls.teacher_config_init(), content, flags)

    @classmethod
    def _resolve_teacher_server_configs(
        cls,
        default_teacher_server_configs: TeacherServers,
        yaml_config: Mapping[str, object],
        cli_passed_flags: Mapping[str, object],
    ) -> TeacherServers:
        """The ancestor's hook: the teacher of `teacher_config_init`, of YAML and of flags (`teacher.base_url`). The
        command line calls an override in place of its own reading.
        """
        above = f"{cls.teacher_namespace}."
        flags = {name.removeprefix(above): flag for name, flag in cli_passed_flags.items() if name.startswith(above)}
        content = yaml_config.get(cls.teacher_namespace) or {}
        if default_teacher_server_configs is None and not flags and not content:
            return None
        content = content[0] if isinstance(content, list) and len(content) == 1 else content
        default: object = default_teacher_server_configs or APIServerConfig()
        if isinstance(default, list) and len(default) == 1:
            default = default[0]
        merged = {}
        if isinstance(default, ServerBaseline) and isinstance(content, Mapping):
            merged = default.model_dump() | dict(content) | flags
            default = APIServerConfig(**default.model_dump()) if flags or content else default
        resolved: TeacherServers = resolve_openai_configs(
            default_server_configs=default,
            openai_config_dict=merged,
            yaml_config={"openai": content},
            cli_passed_flags={f"openai.{key}": value for key, value in flags.items()},
            logger=log,
        )
        return resolved

    async def _before_sending(self, group: ScoredDataGroup) -> ScoredDataGroup:
        return await self._attach_teacher_distillation(await super()._before_sending(group))

    async def _attach_teacher_distillation(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """An accepted group with what the teacher says of it; the ancestor's hook, which a subclass may override."""
        if not self.config.teacher_enabled or self.teacher_server is None:
            return group
        overrides = group.get("group_overrides") or {}
        top_k = int(overrides.get("teacher_top_k", self.config.teacher_top_k))
        group["distill_token_ids"] = group["distill_logprobs"] = None
        if top_k < 0 or overrides.get("skip_teacher_top_k"):
            return group
        if self._trains_here:
            raise WrongSetting(f"--env.teacher_enabled: {NOT_TRAINED_ON['distill_logprobs']}")
        answers = await asyncio.gather(
            *(self._fetch_teacher_for_sequence(tokens, top_k) for tokens in group["tokens"]), return_exceptions=True
        )
        fetched = [answer for answer in answers if not isinstance(answer, BaseException)]
        if failures := [answer for answer in answers if isinstance(answer, BaseException)]:
            log.warning(
                "A group is sent without the teacher, which failed on %d of %d sequences: %s",
                len(failures),
                len(answers),
                failures[0],
            )
            return group
        group["distill_token_ids"] = [ids for ids, _ in fetched]
        group["distill_logprobs"] = [logprobs for _, logprobs in fetched]
        return group

    @property
    def _trains_here(self) -> bool:
        """Return whether the registered trainer is one that does not use what a teacher says."""
        run = vars(self).get("_env_run")  # a hook may be called without any run
        return run is not None and run.needs.trainable_only

    async def _release(self) -> None:
        if self.teacher_server is not None:
            await self.teacher_server.close()
        await super()._release()

    def _validate_teacher_tokenizer_compatibility(self, teacher_tokenizer_name: str) -> None:
        student = self.tokenizer.name_or_path
        if student == teacher_tokenizer_name:
            return
        refusal = f"Cross-tokenizer distillation is not supported: the student's tokenizer is {student!r}"
        with reading(
            f"{refusal}, and the teacher's cannot be compared", ValueError, remedy="set --teacher.tokenizer_name"
        ):
            teacher = load_tokenizer(teacher_tokenizer_name)
        if teacher.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(f"{refusal}, the teacher's {teacher_tokenizer_name!r} has another vocabulary")

    async def _fetch_teacher_for_sequence(
        self, token_ids: list[int], top_k: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Ids and log-probabilities, each [position][k]. Raises ValueError unless there is one entry per token."""
        assert self.teacher_server is not None
        answer = await self.teacher_server.get_logprobs(input_ids=token_ids, top_k=top_k, split="train")
        ids, logprobs = answer["prompt_topk_token_ids"], answer["prompt_topk_logprobs"]
        if not len(ids) == len(logprobs) == len(token_ids):
            raise ValueError(
                f"the teacher gave {len(ids)} positions of ids and {len(logprobs)} of log-probabilities for"
                f" {len(token_ids)} tokens"
            )
        return ids, logprobs
