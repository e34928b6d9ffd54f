"""The kernels of a trainer on a CPU: what they compute, which are taken, and that a resumed run keeps them."""

import logging
import os
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from example_trainer.errors import TrainerError
from example_trainer.loop.learner import Learner
from example_trainer.loop.saves import Saves
from example_trainer.model import cpu_kernels
from example_trainer.model.cpu_kernels import fastest, kernels_of_run, use_kernels
from example_trainer.ranks.ranks import ALONE
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.checkpoint import Progress
from tests.unit.trainer.fakes import model_folder, tiny_model
from tests.unit.trainer.rank_child import sequences

CPU = torch.device("cpu")
SHAPES = Counter({(576, 576): 2, (1536, 576): 1})
# float32 sums in another order; what one rounding to bfloat16 of each factor and of the result leaves
TOLERANCE = {"onednn": 1e-5, "bfloat16": 2e-2}


def computed(layer: nn.Linear, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and gradients of input, weight and bias."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    output = layer(x)
    output.backward(grad)
    found = [output.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad]
    return [value for value in found if value is not None]


@pytest.mark.parametrize("name", ["onednn", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False])
def test_small_integers_multiply_exactly(name: Any, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    layer, x, grad = nn.Linear(24, 40, bias=bias), whole(1, 9, 24), whole(1, 9, 40)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(whole(*parameter.shape))
    expected = computed(layer, x, grad)
    use_kernels(layer, name)
    found = computed(layer, x, grad)
    assert all(value.dtype == torch.float32 for value in found)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["onednn", "bfloat16"])
def test_the_same_input_gives_the_same_bits_and_nearly_those_of_torch(name: Any) -> None:
    torch.manual_seed(0)
    layer, x, grad = nn.Linear(96, 160), torch.randn(50, 96), torch.randn(50, 160)
    expected = computed(layer, x, grad)
    use_kernels(layer, name)
    found, again = computed(layer, x, grad), computed(layer, x, grad)
    for a, b, own in zip(found, again, expected, strict=True):
        assert torch.equal(a, b)
        assert (a - own).norm() <= TOLERANCE[name] * own.norm()


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_factors_are_rounded_to_bfloat16_and_nothing_else(has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_bfloat16:
        monkeypatch.setattr(cpu_kernels, "_has_bfloat16", lambda: False)
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32, bias=False), torch.randn(7, 64)
    use_kernels(layer, "bfloat16")
    exact = F.linear(x.bfloat16().double(), layer.weight.bfloat16().double())
    assert (layer(x) - exact).abs().max() <= exact.abs().max() / 256  # the result's own rounding


def test_a_frozen_weight_gets_no_gradient_and_a_layer_in_bfloat16_stays_as_it_is() -> None:
    layer = nn.Linear(8, 8).requires_grad_(False)
    use_kernels(layer, "onednn")
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    half = nn.Linear(8, 8).bfloat16()
    expected = half(x.bfloat16())
    use_kernels(half, "onednn")
    assert torch.equal(half(x.bfloat16()), expected)


@pytest.mark.parametrize("name", ["onednn", "bfloat16"])
@pytest.mark.parametrize("sampled", [{"temperature": 0.7}, {"top_p": 0.6}, {"top_k": 3, "temperature": 1.3}])
def test_answers_of_any_sampling_are_trained_on(tmp_path: Path, name: str, sampled: dict[str, Any]) -> None:
    model = model_folder(tmp_path / "model", tie_word_embeddings=True, initializer_range=0.1)
    batch, divisor = sequences(0)
    batch = [replace(sequence, **sampled) for sequence in batch]
    learned = {}
    for kernels in ("torch", name):
        learner = begun(TrainerConfig.model_validate({"model_name": model, "kernels": kernels}), "")
        loss = learner.gradients(batch, divisor)["loss"].value
        assert loss is not None
        learned[kernels] = (loss, learner.clip())
    assert learned[name] == pytest.approx(learned["torch"], rel=TOLERANCE[name])


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"weight_bridge_mode": "lora_only"}])
def test_a_step_learns_the_same_by_onednn(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = model_folder(tmp_path / "model", tie_word_embeddings=True, initializer_range=0.1)
    learned = {}
    for name in ("torch", "onednn"):
        config = TrainerConfig.model_validate({"model_name": model, "kernels": name} | changes)
        torch.manual_seed(0)
        learner = begun(config, "")
        batch, divisor = sequences(0)
        loss = learner.gradients(batch, divisor)["loss"].value
        assert loss is not None
        learned[name] = (loss, learner.clip())
    assert learned["onednn"] == pytest.approx(learned["torch"], rel=1e-5)


def begun(config: TrainerConfig, resume: str) -> Learner:
    learner = Learner(config, CPU, ALONE)
    learner.load(resume or config.model_name)
    learner.begin(resume)
    return learner


def test_the_start_model_has_the_kernels_of_the_policy(tmp_path: Path) -> None:
    settings = {"model_name": model_folder(tmp_path / "model"), "kernels": "bfloat16", "kl_coef": 0.1}
    learner = begun(TrainerConfig.model_validate(settings), "")
    assert learner.gradients(*sequences(0))["kl"].value == 0


def test_a_resumed_run_keeps_its_kernels_and_computes_the_same_bits(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    config = TrainerConfig.model_validate(
        {"model_name": model, "save_path": tmp_path / "saved", "kernels": "bfloat16", "checkpoint_format": "hf"}
    )
    learner = begun(config, "")
    step(learner, 1)
    Saves(config, learner, time.sleep).save(replace(learner.progress, step=1))
    losses = [step(learner, nth) for nth in (2, 3)]
    resumed = begun(config.model_copy(update={"kernels": "auto"}), str(tmp_path / "saved/step_1"))
    assert resumed.progress.kernels == "bfloat16"
    assert [step(resumed, nth) for nth in (2, 3)] == losses
    others = begun(config.model_copy(update={"kernels": "torch"}), str(tmp_path / "saved/step_1"))
    assert [step(others, nth) for nth in (2, 3)] != losses


def step(learner: Learner, nth: int) -> float | None:
    loss = learner.gradients(*sequences(nth))["loss"].value
    learner.clip()
    learner.update(1e-2)
    return loss


# --- which are taken --------------------------------------------------------------------------------------------------


def never(shapes: Any, names: Any) -> dict[str, float]:
    raise AssertionError("measured again")


def test_the_faster_is_taken_and_remembered(tmp_path: Path) -> None:
    cache = tmp_path / "cache/kernels.json"
    assert fastest(SHAPES, cache, seconds=lambda shapes, names: {"torch": 1.0, "onednn": 0.9}) == "onednn"
    assert fastest(SHAPES, cache, seconds=never) == "onednn"
    others = Counter({(64, 64): 1})
    assert (
        fastest(others, cache, seconds=lambda shapes, names: {"torch": 1.0, "onednn": 0.99}) == "torch"
    )  # that is noise
    assert [fastest(shapes, cache, seconds=never) for shapes in (SHAPES, others)] == ["onednn", "torch"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b'{"\xff": "torch"}',
        b"[" * 100_000,
        b'{"a": "rm -rf"}',
        b'{"a": 1}',
        b'["onednn"]',
        b'{"a": "' + b"x" * 2**20,
    ],
    ids=["empty", "binary", "not UTF-8", "deep", "unknown", "number", "list", "large"],
)
def test_a_damaged_cache_is_replaced(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "kernels.json"
    cache.write_bytes(content)
    assert fastest(SHAPES, cache, seconds=lambda shapes, names: {"torch": 2.0, "onednn": 1.0}) == "onednn"
    assert f"{cache} is not what a trainer has written" in caplog.text
    assert fastest(SHAPES, cache, seconds=never) == "onednn"


def test_bfloat16_is_a_candidate_only_where_the_sampler_computes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "SMALLEST", 0)
    seconds = {"torch": 3.0, "onednn": 2.0, "bfloat16": 1.0}
    monkeypatch.setattr(cpu_kernels, "timed", lambda shapes, names: {name: seconds[name] for name in names})
    chosen = partial(kernels_of_run, config(tmp_path), tiny_model(), CPU, ALONE, None)
    assert [chosen(dtype) for dtype in ("float32", "bfloat16", "float16")] == ["onednn", "bfloat16", "onednn"]
    monkeypatch.setattr(cpu_kernels, "timed", never)
    assert [chosen(dtype) for dtype in ("float32", "bfloat16")] == ["onednn", "bfloat16"]  # each has its own entry


def test_a_cache_cannot_ask_for_what_is_no_candidate(tmp_path: Path) -> None:
    cache = tmp_path / "kernels.json"
    fastest(SHAPES, cache, seconds=lambda shapes, names: {"torch": 2.0, "onednn": 1.0})
    cache.write_text(cache.read_text().replace('"onednn"', '"bfloat16"'))
    assert fastest(SHAPES, cache, seconds=lambda shapes, names: {"torch": 1.0, "onednn": 1.0}) == "torch"


def test_a_cache_that_cannot_be_written_costs_a_measurement_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels.json").mkdir()
    assert (
        fastest(SHAPES, tmp_path / "kernels.json", seconds=lambda shapes, names: {"torch": 2.0, "onednn": 1.0})
        == "onednn"
    )
    assert "cannot be written" in caplog.text


def test_a_pipe_in_the_place_of_the_cache_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "kernels.json"
    os.mkfifo(cache)
    release = threading.Timer(5.0, lambda: os.close(os.open(cache, os.O_RDWR)))  # a reader that waits
    release.start()
    start = time.monotonic()
    assert fastest(SHAPES, cache, seconds=lambda shapes, names: {"torch": 2.0, "onednn": 1.0}) == "onednn"
    assert time.monotonic() - start < 4
    release.cancel()
    assert caplog.text.count("it is a pipe, not a regular file") == 2  # reading and writing


def test_products_are_timed_by_layer_and_without_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "ROUNDS", (1, 1))
    drawn = torch.get_rng_state()
    found = cpu_kernels.timed(Counter({(64, 64): 1, (2 * cpu_kernels.LARGEST, 8): 3}))
    assert set(found) == {"torch", "onednn"}
    assert min(found.values()) > 0
    assert torch.equal(torch.get_rng_state(), drawn)


def config(tmp_path: Path, **changes: Any) -> TrainerConfig:
    settings = {"model_name": "any", "kernel_cache": tmp_path / "kernels.json"}
    return TrainerConfig.model_validate(settings | changes)


def test_without_a_home_directory_the_cache_is_beside_the_logs(
    tmp_path: Path, fast_onednn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = config(tmp_path, kernel_cache="~nobody-of-this-name/kernels.json", log_dir=tmp_path / "logs")
    assert kernels_of_run(given, tiny_model(), CPU, ALONE, None) == "onednn"
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert (tmp_path / "logs/kernels.json").is_file()


@pytest.fixture
def fast_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is worth measuring, and oneDNN wins."""
    monkeypatch.setattr(cpu_kernels, "SMALLEST", 0)
    monkeypatch.setattr(cpu_kernels, "timed", lambda shapes, names: {"torch": 2.0, "onednn": 1.0})


def test_auto_measures_on_a_cpu_alone(tmp_path: Path, fast_onednn: None) -> None:
    model, given = tiny_model(), config(tmp_path)
    assert kernels_of_run(given, model, CPU, ALONE, None) == "onednn"
    assert kernels_of_run(given, model, torch.device("cuda"), ALONE, None) == "torch"
    exact = config(tmp_path, batch_invariant=True)
    assert kernels_of_run(exact, model, CPU, ALONE, None) == "torch"


def test_a_small_model_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "timed", never)
    assert kernels_of_run(config(tmp_path), tiny_model(), CPU, ALONE, None) == "torch"


def test_a_checkpoint_decides_unless_a_flag_does(
    tmp_path: Path, fast_onednn: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    for saved in ("torch", "onednn", "bfloat16"):
        assert kernels_of_run(config(tmp_path), model, CPU, ALONE, saved) == saved
    assert not caplog.records
    assert kernels_of_run(config(tmp_path, kernels="torch"), model, CPU, ALONE, "onednn") == "torch"
    assert "the checkpoint's run used onednn, so bits differ" in caplog.text
    assert kernels_of_run(config(tmp_path), model, CPU, ALONE, "of another release") == "onednn"
    assert "'of another release', which are not on this machine" in caplog.text


@pytest.mark.parametrize(
    ("device", "flags", "own"),
    [
        ("cuda", {}, "a GPU"),
        ("cpu", {"batch_invariant": True}, "--batch-invariant"),
        ("cpu", {"weight_bridge_mode": "shared_vllm", "single_copy": True}, "a single copy"),
    ],
)
def test_a_run_that_cannot_keep_the_kernels_of_its_checkpoint_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, device: str, flags: dict[str, Any], own: str
) -> None:
    given = config(tmp_path, **flags)
    for saved in ("torch", "onednn"):
        assert not caplog.records
        assert kernels_of_run(given, tiny_model(), torch.device(device), ALONE, saved) == "torch"
    assert f"The checkpoint's run used the kernels onednn; {own} has its own, so bits differ" in caplog.text


def test_a_checkpoint_from_before_the_choice_continues_by_torch() -> None:
    old = vars(Progress(3, 3, 2)).copy()
    del old["kernels"]
    assert Progress(**old).kernels == "torch"


def test_kernels_that_are_not_here_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(tmp_path, kernels="onednn")
    with pytest.raises(TrainerError, match="--kernels onednn multiplies on CPUs, and this run is on cuda"):
        kernels_of_run(asked, tiny_model(), torch.device("cuda"), ALONE, None)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(TrainerError, match="which this PyTorch lacks: use --kernels torch or auto"):
        kernels_of_run(asked, tiny_model(), CPU, ALONE, None)
    with pytest.raises(ValueError, match="--kernels onednn: --batch-invariant computes with vLLM's kernels"):
        config(tmp_path, kernels="onednn", batch_invariant=True)


@pytest.mark.parametrize(("seconds", "level"), [(1.0, logging.INFO), (4.0, logging.WARNING)])
def test_what_bfloat16_gains_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float, level: int
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(cpu_kernels, "SMALLEST", 0)
    monkeypatch.setattr(cpu_kernels, "timed", lambda shapes, names: {"torch": 2.0, "bfloat16": seconds})
    asked = config(tmp_path, kernels="bfloat16")
    assert kernels_of_run(asked, tiny_model(), CPU, ALONE, None) == "bfloat16"
    assert caplog.records[-1].levelno == level
    assert f"{2 / seconds:.2f} times as fast as in float32" in caplog.text
