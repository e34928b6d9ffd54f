"""Where a run's teacher is: on GPUs of its own, the last visible ones, or on the CPU beside vLLM and the trainer."""

from collections.abc import Sequence
from dataclasses import dataclass

from atropos_launcher.placement.gpus import MOST_OF_GPU, dtype_of_server, served_dtype
from atropos_launcher.run_file.run_file import RunFile
from atropos_launcher.run_file.servers import Tree, served_tokens
from atroposlib.flags import ConfigError
from example_trainer.memory.model_size import model_size
from example_trainer.memory.plan import VLLM_OWN, Serving, amount, table
from example_trainer.memory.tp_plans import MOST
from example_trainer.settings.bridges import MODES
from example_trainer.settings.config import TrainerConfig

# Of a prompt whose log-probabilities are asked for, vLLM makes as many rows of logits at a time.
PASS_TOKENS = 2048
MOST_LOGPROBS = 20  # that vLLM gives without --max-logprobs


@dataclass(frozen=True)
class TeacherPlace:
    """A teacher as the services reach it. `model`, `port` and `gpus` are those of a server that the run starts."""

    url: str
    model: str = ""
    port: int = 0
    gpus: tuple[str, ...] = ()


def gpus_of_teacher(run: RunFile, gpus: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The GPUs of a teacher that is started, and those for vLLM and the trainer. Raises ConfigError for too few."""
    teacher = run.teacher
    if teacher is None or teacher.model is None or not gpus:
        return (), list(gpus)
    asked, shown = run.layout.teacher, f"the visible GPUs are {', '.join(gpus)}"
    mine = tuple(gpus[-teacher.ranks :] if asked == "auto" else asked)
    if unknown := [gpu for gpu in mine if gpu not in gpus]:
        raise ConfigError(f"layout.teacher: there is no GPU {unknown[0]}; {shown}")
    if twice := [gpu for at, gpu in enumerate(mine) if gpu in mine[:at]]:
        raise ConfigError(f"layout.teacher: GPU {twice[0]} stands twice: name each once")
    if len(mine) != teacher.ranks:
        raise ConfigError(
            f"teacher.tensor_parallel_size {teacher.ranks} takes {teacher.ranks} GPU(s), but the teacher has"
            f" {', '.join(mine)}; {shown}"
        )
    others = [gpu for gpu in gpus if gpu not in mine]
    named = run.layout.names_gpus
    if named or (not others and asked != "auto"):
        others = list(gpus)  # they may share one: the user says how
        if "gpu_memory_utilization" not in teacher.flags:
            raise ConfigError(
                "layout: where GPUs are named, say how much of its own the teacher takes, such as"
                " --teacher.gpu-memory-utilization 0.3, and vLLM likewise if they share one"
            )
    if not others:
        raise ConfigError(
            f"teacher: it takes {len(mine)} GPU(s), and vLLM and the trainer need one more; {shown}. Give the address"
            " of a server elsewhere (--teacher.url), or let them share one: --layout.teacher"
            f" {gpus[0]} --teacher.gpu-memory-utilization 0.2 --vllm.gpu-memory-utilization 0.3"
        )
    return mine, others


def longest_sequence(run: RunFile, trainer: TrainerConfig) -> int:
    """Tokens of the longest sequence that the teacher has to read: the trainer's, or vLLM's where that is shorter."""
    lengths = [served_tokens(server) for server in run.servers]
    known = [length for length in lengths if length is not None]
    return min([trainer.seq_len, *([max(known)] if len(known) == len(lengths) else [])])


def teacher_flags(run: RunFile, place: TeacherPlace, trainer: TrainerConfig, host: str) -> Tree:
    """The flags of the server of a teacher that is started, the run's own on top. Raises ConfigError for a context that
    does not hold what it is asked about.
    """
    assert run.teacher is not None
    on_gpus, longest = bool(place.gpus), longest_sequence(run, trainer)
    flags: Tree = {
        "dtype": served_dtype(run, on_gpus),
        "max_num_seqs": 64,
        "max_model_len": longest + 1,  # it has to answer a token
        "max_num_batched_tokens": PASS_TOKENS,
        **({} if on_gpus else {"block_size": 32}),
        **({"max_logprobs": trainer.distill_top_k} if trainer.distill_top_k > MOST_LOGPROBS else {}),
        **run.teacher.flags,
    }
    given = flags["max_model_len"]
    if isinstance(given, int) and given <= longest:
        raise ConfigError(
            f"teacher.max_model_len {given}: the teacher reads sequences of up to {longest} tokens (--trainer.seq-len,"
            f" --vllm.max-model-len) and has to answer one more: give {longest + 1} or more, or leave it out"
        )
    return {**flags, "model": place.model, "host": host, "port": place.port}


def serving_of_teacher(run: RunFile, place: TeacherPlace, trainer: TrainerConfig) -> Serving | None:
    """A rank of the server of a teacher that is started; None where the size of its model is not known."""
    size = model_size(place.model) if place.model else None
    if size is None or run.teacher is None:
        return None
    flags, on_gpus = run.teacher.flags, bool(place.gpus)
    length = served_tokens(flags) or longest_sequence(run, trainer) + 1
    dtype = dtype_of_server(run, flags, on_gpus)
    plain = trainer.model_copy(update={"bridge": MODES["restart"]()})  # it gets no weights
    return Serving(plain, size, dtype, max(1, len(place.gpus)), on_gpus, length)


def gpu_memory_of_teacher(
    run: RunFile, place: TeacherPlace, trainer: TrainerConfig, gpu: int
) -> tuple[list[str], str | None]:
    """The table of --dry-run for GPUs, and why a teacher that is started cannot be split, or does not fit its GPUs of
    `gpu` bytes, if so.
    """
    serving = serving_of_teacher(run, place, trainer)
    if serving is None or run.teacher is None:
        return [], None
    flags, ranks = run.teacher.flags, run.teacher.ranks
    indivisible = serving.size.split_refusal(ranks, "the teacher's --tensor-parallel-size", len(place.gpus) or MOST)
    if not place.gpus:
        return [], indivisible
    taken = int(gpu * float(flags.get("gpu_memory_utilization") or serving.share(gpu)))
    left = max(0, taken - serving.weights - VLLM_OWN)
    lines = table(f"Each GPU of the teacher ({', '.join(place.gpus)})", serving.items(left), gpu)
    if serving.least <= taken or indivisible:
        return lines, indivisible
    more = ", more of one (--teacher.gpu-memory-utilization)" if serving.least <= MOST_OF_GPU * gpu else ""
    return lines, (
        f"the teacher needs {amount(serving.least)} on each of {serving.ranks} GPU(s), but a GPU has {amount(gpu)} of"
        f" which it may take {amount(taken)}: give it more GPUs (--teacher.tensor-parallel-size){more}, or use a"
        " smaller teacher"
    )
