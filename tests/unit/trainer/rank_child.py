"""Trainer ranks without API and vLLM: they learn from made-up batches, and write down the results.

    python -m tests.unit.trainer.rank_child JOB.json              this process is one rank: alone, or under torchrun
    python -m tests.unit.trainer.rank_child --fork                the same of each JOB.json that stdin names: the ranks
                                                                  are forked from this process, which has loaded torch
                                                                  once for all of them, and says when they have ended

In a job's directory `out`, rank 0 writes results.json and model/, or the adapter; every rank writes rank_N.json.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence as PySequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from atroposlib.processes.identity import this_process
from atroposlib.wire.batching import GroupRequirements
from atroposlib.wire.bridge import SharedRank, SingleCopyOffer
from example_trainer.bridges import single_copy
from example_trainer.bridges.session import Session, offered_by_us
from example_trainer.data.batching import PLAIN, Sequence, make_batch
from example_trainer.loop import learner as learner_module
from example_trainer.loop.learner import Learner
from example_trainer.loop.offline import OfflineData
from example_trainer.loop.overlap import Part, together
from example_trainer.loss import batch_gradients as step_module
from example_trainer.loss.metric import Metrics, added, values
from example_trainer.memory.fits import Room
from example_trainer.model import policy
from example_trainer.model.memory_check import smallest_room
from example_trainer.model.tensor_parallel import sum_partial_gradients
from example_trainer.ranks.partition import local
from example_trainer.ranks.place import VARIABLE
from example_trainer.ranks.ranks import collective, join
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.loss import LossSettings
from example_trainer.weights import load
from example_trainer.weights.shared import shared_tensors
from tests.unit.trainer.arenas import ranks_of
from tests.unit.trainer.bridges.test_single_copy_bridge import FakeVllm
from tests.unit.trainer.fakes import as_records, item, made_up_answers, with_made_up_teacher
from tests.unit.trainer.process_memory import anonymous_memory
from vllm_patching.memory.shared_buffer import SharedBuffer

GROUPS = 4
# what FSDP2 calls of torch.distributed: its names since PyTorch 2.13, or those before
FSDP_CALLS = {
    "gathers": "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor",
    "sums": "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor",
}
MESHES: list[DeviceMesh] = []
JOB_S = 60.0  # more than any job takes


def sequences(
    step: int,
    seq_len: int = 64,
    groups: int = GROUPS,
    answers: int = 4,
    given: bool = False,
    loss: LossSettings = PLAIN,
    top_p: float = 1.0,
) -> tuple[list[Sequence], int]:
    """A step's sequences, of ragged lengths, and the divisor of their losses. The last group has one answer fewer;
    with `given`, the first comes with log-probabilities of the reference.
    """
    made = [
        item(
            [1.0, 0.0, 0.0, 1.0][: answers - (index == groups - 1)],
            seed=100 * step + index,
            longest=3 + 4 * index,
            generation_params={"top_p": top_p},
        )
        for index in range(groups)
    ]
    if given:
        made[0]["ref_logprobs"] = [[-1.5] * len(tokens) for tokens in made[0]["tokens"]]
    needs = GroupRequirements(trainable_only=True, teacher_top_k=loss.teacher_top_k)
    if needs.teacher_top_k is not None:
        made = [with_made_up_teacher(group, needs.teacher_top_k) for group in made]
    batch = make_batch(as_records(made), seq_len=seq_len, policy_version=0, loss=loss, needs=needs)
    return batch.sequences, batch.loss_divisor


def main(job: dict[str, Any]) -> None:
    """What one rank does for a job."""
    torch.set_num_threads(1)
    disable_progress_bar()
    config = TrainerConfig.model_validate(job["config"])
    if rows := job.get("chunk_rows"):  # of the head: its logits are too few to be cut by their size

        def chunks(count: int, head: Any, chunk_mb: int) -> list[slice]:
            return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]

        setattr(policy, "_chunks", chunks)  # noqa: B010
    if job.get("unchecked"):  # the forward passes of the check gather what the loading must not
        setattr(load, "expect_packed", lambda *loaded: None)  # noqa: B010
    mutate(job.get("mutation"))
    calls = {what: counted(name) for what, name in FSDP_CALLS.items()}
    torch.manual_seed(config.seed)
    device = torch.device("cpu")
    ranks = join(config, device)
    MESHES.extend([ranks.mesh] if ranks.mesh is not None else [])
    seconds = group_seconds(ranks.mesh, [ranks._control] if ranks.size > 1 else [])
    least = smallest_room(Room(10 + ranks.rank, 20 - ranks.rank), ranks)
    learner = Learner(config, device, ranks)
    try:
        with anonymous_memory() as memory:
            if ranks.leads and job.get("fails_alone"):
                fail_alone(learner, job)
            elif ranks.leads:
                lead(learner, job)
            else:
                ranks.follow(learner)
        about = held(learner) | {"seconds": seconds, "anonymous": memory, "calls": calls}
        about["least"] = [least.device, least.host]
        (Path(job["out"]) / f"rank_{ranks.rank}.json").write_text(json.dumps(about))
    finally:
        ranks.leave()


def mutate(mutation: str | None) -> None:
    """Break how gradients that are parts of a sum over "tp" are summed: `never`, or once `each` micro-batch."""
    if mutation is not None:
        setattr(learner_module, "sum_partial_gradients", lambda *given: None)  # noqa: B010
    if mutation == "each":
        plain = policy.accumulate_gradients

        def accumulate(own: policy.Policy, *given: Any, **named: Any) -> None:
            plain(own, *given, **named)
            sum_partial_gradients(own.model, MESHES[-1])

        setattr(step_module, "accumulate_gradients", accumulate)  # noqa: B010


def lead(learner: Learner, job: dict[str, Any]) -> None:
    """Rank 0's part: it has the others load, learn and answer."""
    out, config, prompt = Path(job["out"]), learner.config, list(range(1, 30))
    source = job.get("source", config.model_name)
    memory = arenas(job["arenas"], config.tp_size) if "arenas" in job else []
    if memory:
        learner.load_over(source, [worker for worker, _ in memory])
        learner.write_start()
    else:
        learner.load(source)
    trained = learner.trained
    found: list[dict[str, Any]] = []
    at_start: list[float] = []
    if job["steps"]:
        learner.begin("")
        at_start = trained.prompt_logprobs(prompt).tolist()
        trained.write(out / "start")  # what a probe leaves gathered cannot be written
    sides = job.get("offline_sides")
    offline = OfflineData(learner, made_up_answers(12, sides)) if sides else None
    for step in range(job["steps"]):
        batch, tokens = sequences(step, loss=config, **job.get("batch", {}))
        if config.old_logprobs == "recomputed":
            batch = learner.with_old_logprobs(batch)
            learner.gradients(batch, tokens)
            learner.clip()
            learner.update(config.lr)
        measured = in_parts(learner, batch, tokens) if job.get("parts") else learner.gradients(batch, tokens)
        compared = learner.comparison
        if offline is not None:
            measured = added((measured, offline.add_gradient(step)))
        by_sequence = [values.tolist() for values in learner.by_sequence(batch, compared)]
        norm = learner.clip()
        if job.get("probe"):
            trained.prompt_logprobs(prompt)  # must not keep weights from before the update
        learner.update(config.lr)
        found.append({**values(measured), "grad_norm": norm, **compared.row()})
    if job["steps"]:
        trained.write(out / "model")
    results: dict[str, Any] = {"steps": found, "start": at_start}
    results["by_sequence"] = by_sequence if job["steps"] else []  # of the last step
    if job["steps"]:
        results["logprobs"] = trained.prompt_logprobs(prompt).tolist()
        rows = learner.logits([prompt, prompt[:3]], [[0, 27], [1]], "float32").log_softmax(-1)
        asked = [float(row[prompt[place + 1]]) for row, place in zip(rows, (0, 27, 1), strict=True)]
        torch.testing.assert_close(asked, [results["logprobs"][place] for place in (0, 27, 1)], atol=1e-4, rtol=1e-4)
        count = sum(parameter.numel() for parameter in trained.model.parameters())
        results["held"] = sum(local(each).numel() for each in trained.model.parameters()) / count
        results["moments"] = sum(local(each["exp_avg"]).numel() for each in learner.optimizer.state.values()) / count
    if memory:
        learner.settle(True)
        results["inside"] = learner._copy.inside()
        save_file(served(memory), out / "served.safetensors")
    (out / "results.json").write_text(json.dumps(results))


def in_parts(learner: Learner, batch: list[Sequence], tokens: int) -> Metrics:
    """What --overlap computes of a batch that arrives in two parts."""
    parts = []
    for part in (batch[:6], batch[6:]):
        parts.append(Part(part, learner.gradients(part, 1.0), learner.comparison))
    learner.divide(tokens)
    return together(parts, tokens)


def fail_alone(learner: Learner, job: dict[str, Any]) -> None:
    """Rank 0's part of a single copy in which its own update fails before its first write, and no other rank's does:
    what vLLM is told, and into which of its ranks' memory a trainer rank has written.
    """
    config = learner.config
    model = AutoModelForCausalLM.from_pretrained(config.model_name, dtype=torch.float32)
    vllm: Any = FakeVllm(model, config.tp_size)
    manifest = vllm.manifest()
    offer = SingleCopyOffer(**offered_by_us(20), manifest_digest=manifest.digest(), process=this_process())
    learner.load_over(config.model_name, vllm.workers)
    bridge = single_copy._connect_ranks(config, Session(vllm, offer), manifest, learner.trained)
    bridge.sync(0, lambda: None)
    learner.begin("")
    learner.gradients(*sequences(0, loss=config))
    learner.clip()

    def update(own: Learner, rate: float) -> None:
        raise MemoryError

    setattr(Learner, "update", collective(update))  # noqa: B010  of this process alone
    with contextlib.suppress(MemoryError):
        bridge.sync(1, lambda: learner.update(config.lr))
    before, give_up = vllm.served[0], time.monotonic() + JOB_S / 2
    while (wrote := [not torch.equal(*pair) for pair in zip(before, vllm.held(), strict=True)]) != [False, True]:
        assert time.monotonic() < give_up, wrote
        time.sleep(0.01)
    (Path(job["out"]) / "told.json").write_text(json.dumps(vllm.told))


def arenas(model: str, tp: int) -> list[tuple[SharedRank, SharedBuffer]]:
    """The memory of vLLM's ranks that serve `model`, which other processes can open."""
    workers, contents = ranks_of(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tp)
    found = []
    for worker, content in zip(workers, contents, strict=True):
        buffer = SharedBuffer(worker.nbytes)
        buffer.tensor.copy_(content)
        found.append((structs.replace(worker, process=this_process(), fd=buffer.fd), buffer))
    return found


def served(memory: list[tuple[SharedRank, SharedBuffer]]) -> dict[str, torch.Tensor]:
    """The weights in the ranks' memory, put together; ranks that hold the same must hold the same bits."""
    workers, buffers = zip(*memory, strict=True)
    tensors = shared_tensors(list(workers), [buffer.tensor for buffer in buffers], torch.nn.Parameter)
    for tensor in tensors.values():
        assert all(torch.equal(piece.parameter, same) for piece in tensor.pieces for same in piece.replicas), tensor
    return {
        name: torch.cat([piece.parameter.detach() for piece in tensor.pieces], tensor.dim).contiguous()
        for name, tensor in tensors.items()
    }


def held(learner: Learner) -> dict[str, Any]:
    """What this rank holds of each parameter and its moments, as shapes, beside the whole shape; and their dtypes."""
    if not hasattr(learner, "trained"):
        return {}
    parameters = dict(learner.trained.model.named_parameters())
    state = learner.optimizer.state if hasattr(learner, "optimizer") else {}
    reference = getattr(learner, "_reference", None)
    # of rank 0, the only one whose groups still exist
    meshes = {each.device_mesh for each in parameters.values() if isinstance(each, DTensor) and learner.ranks.leads}
    of_reference = dict(reference.named_parameters()) if reference else {}
    return {
        "mesh_seconds": {" ".join(mesh.mesh_dim_names or ()): group_seconds(mesh) for mesh in meshes},
        "parameters": {name: [list(local(each).shape), list(each.shape)] for name, each in parameters.items()},
        "reference": {name: [list(local(each).shape), list(each.shape)] for name, each in of_reference.items()},
        "moments": {
            name: list(local(state[each]["exp_avg"]).shape) for name, each in parameters.items() if each in state
        },
        "digests": {name: digest(local(each)) for name, each in parameters.items()},
        "dtypes": {name: str(each.dtype).removeprefix("torch.") for name, each in parameters.items()},
    }


def digest(values: torch.Tensor) -> str:
    """Of their bits."""
    return hashlib.sha256(values.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def group_seconds(mesh: DeviceMesh | None, more: PySequence[dist.ProcessGroup] = ()) -> list[float]:
    """The deadline of each process group of the mesh, and of the others."""
    if mesh is None:
        return []
    groups = [*map(mesh.get_group, range(mesh.ndim)), *more]
    deadlines: list[timedelta] = [
        group._get_backend(torch.device("cpu")).options._timeout
        for group in groups
        if isinstance(group, dist.ProcessGroup)
    ]
    return [deadline.total_seconds() for deadline in deadlines]


def counted(name: str) -> list[int]:
    """How often FSDP2 has called this function of torch.distributed: the one item of the list."""
    plain, calls = getattr(dist, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return plain(*args, **kwargs)

    setattr(dist, name, call)
    return calls


def run_forked(job: dict[str, Any]) -> None:
    """Run a job's ranks, forked from this process, and write what failed to `out`/error."""
    size = job.get("ranks", 1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        place = (size, listener.getsockname()[1], listener.fileno(), os.getpid())
        children = [_fork(job, rank, place) for rank in range(size)]
    deadline = time.monotonic() + JOB_S
    while children:
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
        if time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def _fork(job: dict[str, Any], rank: int, place: tuple[int, ...]) -> int:
    if child := os.fork():
        return child
    os.environ[VARIABLE] = " ".join(map(str, (rank, *place)))
    try:
        main(job)
    except BaseException as error:
        with (Path(job["out"]) / "error").open("a") as file:
            file.write(f"{type(error).__name__}: {error}\n")
        if job.get("shown", True):
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] != "--fork":
        main(json.loads(Path(sys.argv[1]).read_text()))
    else:
        for path in iter(sys.stdin.readline, ""):
            started = time.monotonic()
            run_forked(json.loads(Path(path.strip()).read_text()))
            print(f"{time.monotonic() - started:6.2f} s", flush=True)
