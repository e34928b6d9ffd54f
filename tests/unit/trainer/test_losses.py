"""Loss terms on numbers worked out by hand."""

import pytest
import torch

from example_trainer.losses import LossSettings, clipped_surrogate, k3, token_losses
from example_trainer.policy import logprobs_and_entropy


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (0.1, 1.0, -0.1, -1.0),
        (1.0, 1.0, -1.0, -1.0),
        (1.5, 1.0, -1.2, 0.0),
        (3.0, 1.0, -1.2, 0.0),
        (0.1, -1.0, 0.8, 0.0),
        (0.5, -1.0, 0.8, 0.0),
        (1.5, -1.0, 1.5, 1.0),
        (3.0, -1.0, 3.0, 1.0),
    ],
)
def test_surrogate_is_pessimistic_for_both_signs(ratio: float, advantage: float, loss: float, slope: float) -> None:
    ratios = torch.tensor([ratio], requires_grad=True)
    losses, clipped = clipped_surrogate(ratios, torch.tensor([advantage]), 0.2, 0.2)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert ratios.grad is not None
    assert ratios.grad.item() == slope
    assert clipped.item() is (slope == 0.0)


def test_upper_clip_distance_is_its_own() -> None:
    losses, _ = clipped_surrogate(torch.tensor([5.0]), torch.tensor([1.0]), 0.2, 0.28)
    assert losses.item() == pytest.approx(-1.28)


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    assert k3(logprobs, torch.tensor([-1.0, -3.0, -0.2])).tolist() == pytest.approx(
        [0.0, 0.135335283 + 2 - 1, 2.225540928 - 0.8 - 1]
    )


def test_kl_without_a_reference_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="reference"):
        token_losses(-one, one, -one, one, None, LossSettings(kl_coef=0.1))


def test_fused_logprobs_and_entropy_have_the_gradients_of_their_formulas() -> None:
    torch.manual_seed(0)
    logits = 4 * torch.randn(5, 11)
    logits[0, 3] = -1e4  # a probability that underflows to zero
    targets, temperatures = torch.tensor([1, 0, 10, 4, 4]), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.1])
    weights = torch.randn(2, 5)

    ours = logits.clone().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(ours * 1, targets, temperatures)
    (weights[0] * logprobs + weights[1] * entropy).sum().backward()

    exact = logits.double().requires_grad_()
    all_logprobs = (exact / temperatures[:, None]).log_softmax(-1)
    expected_logprobs = all_logprobs.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    (weights[0] * expected_logprobs + weights[1] * expected_entropy).sum().backward()

    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    assert ours.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
