"""`TeacherDistillationEnv`: adds what a teacher model says of the sampled tokens to every group.

    accepted group ──tokens──▶ teacher server (prompt log-probabilities, one request per sequence)
                               ──▶ distill_token_ids, distill_logprobs [sequence][position][k] ──▶ API ──▶ trainer

The teacher is another server with its own flags (`--teacher.base_url`, ..., or `teacher:` in YAML). It must have
the student's vocabulary, since ids are compared with ids. At each position the sequence's own token comes first,
then the teacher's likeliest others; nothing precedes the first position, so its lists are empty.

A trainer that distils (--distill-coef) registers how many tokens it needs the teacher to name. A group on which the
teacher then fails, or says what no model can say, is dropped with the cause: it is never trained on as if there were no
teacher. A trainer of this project that does not distil would ignore the teacher: there the first group ends the
environment with a line that says so. For other trainers the group is sent without the fields of a teacher that failed.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from jinja2 import TemplateError
from pydantic import Field, create_model

from atroposlib.clients.activity import TEACHER_FAILED
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup, ServerBaseline
from atroposlib.envs.errors import EnvError, OtherTokenizer, WrongSetting
from atroposlib.envs.failures import GroupLost
from atroposlib.envs.run.environment import Environment, ServerConfigs
from atroposlib.envs.server_handling.server_config import resolve_openai_configs
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import reading
from atroposlib.flags import Setting
from atroposlib.groups import NOT_TRAINED_ON, Untrainable, check
from atroposlib.logs import get_logger
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.wire.batching import NOT_TRAINED, GroupRequirements

log = get_logger(__name__)

CROSS_TOKENIZER = "Cross-tokenizer distillation is not supported"
PROBE = [{"role": "user", "content": "What is 2 + 3?"}]

TeacherServers = ServerBaseline | Sequence[APIServerConfig] | None


class TeacherDistillationConfig(BaseEnvConfig):
    """A group's `group_overrides` may hold `teacher_top_k`, or `skip_teacher_top_k`, for itself."""

    teacher_enabled: bool = Field(default=False, description="Ask the teacher about every accepted group.")
    teacher_top_k: int = Field(
        default=0,
        ge=-1,
        description=(
            "Likeliest tokens per position, in addition to the sequence's own; 0: only its own, -1: do not ask. A"
            " trainer that distils may need more, and gets them."
        ),
    )
    teacher_other_template: bool = Field(
        default=False,
        description="Accept a teacher whose chat template differs: it reads conversations in the student's form.",
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
        if config.teacher_enabled and config.deterministic:
            raise ValueError("deterministic: a teacher's log-probabilities are not the same again; drop one of them")
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
        awaited = self._awaits_teacher(group)
        group = await self._attach_teacher_distillation(await super()._before_sending(group))
        if awaited and self._distils:
            try:
                check(group, self._needs)
            except Untrainable as error:
                raise _lost(f"what the teacher says of it cannot be trained on: {error}") from None
        return group

    def _awaits_teacher(self, group: ScoredDataGroup) -> bool:
        hook = type(self)._attach_teacher_distillation
        return self._top_k(group) is not None or hook is not TeacherDistillationEnv._attach_teacher_distillation

    def _top_k(self, group: ScoredDataGroup) -> int | None:
        """How many tokens the teacher is to name beside a sequence's own; None if it is not asked."""
        overrides = group.get("group_overrides") or {}
        top_k = int(overrides.get("teacher_top_k", self.config.teacher_top_k))
        if not self.config.teacher_enabled or top_k < 0 or overrides.get("skip_teacher_top_k"):
            return None
        return max(top_k, self._needs.teacher_top_k or 0)

    async def _attach_teacher_distillation(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """An accepted group with what the teacher says of it; the ancestor's hook, which a subclass may override."""
        if not self.config.teacher_enabled or self.teacher_server is None:
            return group
        group["distill_token_ids"] = group["distill_logprobs"] = None
        if (top_k := self._top_k(group)) is None:
            return group
        if self._needs.trainable_only and not self._distils:
            raise WrongSetting(f"--env.teacher_enabled: {NOT_TRAINED_ON['distill_logprobs']}")
        answers = await asyncio.gather(
            *(self._fetch_teacher_for_sequence(tokens, top_k) for tokens in group["tokens"]), return_exceptions=True
        )
        fetched = [answer for answer in answers if not isinstance(answer, BaseException)]
        if failures := [answer for answer in answers if isinstance(answer, BaseException)]:
            what = f"the teacher, which failed on {len(failures)} of {len(answers)} sequences: {failures[0]}"
            if self._distils:
                raise _lost(f"it cannot be trained on without {what}") from failures[0]
            log.warning("A group is sent without %s", what)
            return group
        said = [_of_sampled(*each, mask) for each, mask in zip(fetched, group["masks"], strict=True)]
        group["distill_token_ids"] = [ids for ids, _ in (said if self._distils else fetched)]
        group["distill_logprobs"] = [logprobs for _, logprobs in (said if self._distils else fetched)]
        return group

    @property
    def _needs(self) -> GroupRequirements:
        """What the registered trainer needs."""
        run = vars(self).get("_env_run")  # a hook may be called without any run
        return GroupRequirements() if run is None else run.needs

    @property
    def _distils(self) -> bool:
        """Return whether the registered trainer trains on what a teacher says."""
        return self._needs.teacher_top_k is not None

    async def _expect_teacher(self) -> None:
        if self.teacher_server is None:
            return
        servers = self.teacher_server.servers
        contexts = [await server.context_length() for server in self.server.servers]
        longest = min([self.max_token_len, *([max(filter(None, contexts))] if all(contexts) else [])])
        await self._env_run.wait_for(servers, "teacher", "--teacher.base_url")
        for server in servers:
            try:
                await server.compare_tokenizer(self.tokenizer)
            except OtherTokenizer as error:
                raise OtherTokenizer(
                    f"{CROSS_TOKENIZER}: {error.args[0].partition('. Set ')[0]}. Take a teacher with the student's"
                    " tokenizer"
                ) from None
            limit = await server.context_length()
            if limit is not None and limit <= longest:
                raise WrongSetting(
                    f"the teacher at {server.name} reads at most {limit} tokens and has to answer one, but a sequence"
                    f" may have {longest} (the trainer's --seq-len, or the student's context): start the teacher with"
                    f" --max-model-len {longest + 1} or more, or the trainer with --seq-len {limit - 1} or less"
                )

    async def _release(self) -> None:
        if self.teacher_server is not None:
            await self.teacher_server.close()
        await super()._release()

    def _validate_teacher_tokenizer_compatibility(self, teacher_tokenizer_name: str) -> None:
        student = self.tokenizer.name_or_path
        if student == teacher_tokenizer_name:
            return
        refusal = f"{CROSS_TOKENIZER}: the student's tokenizer is {student!r}"
        with reading(
            f"{refusal}, and the teacher's cannot be compared", ValueError, remedy="set --teacher.tokenizer_name"
        ):
            teacher = load_tokenizer(teacher_tokenizer_name)
        if teacher.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(f"{refusal}, the teacher's {teacher_tokenizer_name!r} has another vocabulary")
        if not self.config.teacher_other_template:
            self._expect_same_template(teacher)

    def _expect_same_template(self, teacher: object) -> None:
        """Raise ValueError for a teacher whose chat template makes other tokens of a conversation."""
        theirs, ours = _ids_of_probe(teacher), _ids_of_probe(self.tokenizer)
        if theirs == ours:
            return
        told = [f"{len(ids)} tokens" if ids else "none, for want of a template" for ids in (ours, theirs)]
        raise ValueError(
            f"the chat templates differ: the student's makes {told[0]} of a test conversation, the teacher's {told[1]},"
            " or other ones. The teacher would read conversations in a form that it was not trained on. Give the"
            " student the teacher's template (--env.chat_template, `atropos train`: --chat-template), or set"
            " --env.teacher_other_template"
        )

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


def _ids_of_probe(tokenizer: Any) -> list[int] | None:
    """The tokens of a test conversation; None where the tokenizer has no chat template, or one that refuses it."""
    try:
        return [*tokenizer.apply_chat_template(PROBE, tokenize=True, add_generation_prompt=True, return_dict=False)]
    except (EnvError, ValueError, TypeError, TemplateError):
        return None


def _of_sampled(
    ids: list[list[int]], logprobs: list[list[float]], mask: Sequence[int]
) -> tuple[list[list[int]], list[list[float]]]:
    """Empty lists where nothing was sampled: a trainer that distils does not read them."""
    sampled = [target != NOT_TRAINED for target in mask]
    return (
        [each if taken else [] for each, taken in zip(ids, sampled, strict=True)],
        [each if taken else [] for each, taken in zip(logprobs, sampled, strict=True)],
    )


def _lost(reason: str) -> GroupLost:
    return GroupLost(reason, TEACHER_FAILED, "groups_lost")


def with_teacher(env_cls: type[Environment], of_env: type[BaseEnvConfig]) -> type[Environment]:
    """An environment that knows of no teacher, with one: what `--teacher.*` makes of it. `of_env` is the class of its
    configuration.
    """
    ours = TeacherDistillationConfig
    bases = (ours,) if issubclass(ours, of_env) else (of_env, ours)
    config_cls = create_model(of_env.__name__, __base__=bases, __doc__=of_env.__doc__)

    def config_init(cls: type[Environment]) -> tuple[BaseEnvConfig, ServerConfigs]:
        config, servers = super(made, cls).config_init()  # type: ignore[misc]
        given = {name: getattr(config, name) for name in config.model_fields_set}
        return cast(BaseEnvConfig, config_cls.model_construct(**given)), servers

    made: type[Environment] = type(
        env_cls.__name__,
        (env_cls, TeacherDistillationEnv),
        {
            "env_config_cls": config_cls,
            "config_init": classmethod(config_init),
            "__module__": env_cls.__module__,
            "__doc__": env_cls.__doc__,
        },
    )
    return made
