"""The columns of metrics.jsonl in words, and the charts that the window draws of them, in the order in which people
look. docs/run_directory.md says what each column is.
"""

import msgspec


class Chart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chart of the column `key`, or of the columns `keys` by the name of each line."""

    key: str
    title: str
    unit: str
    keys: dict[str, str] = {}
    fit: bool = False  # the axis need not show 0
    log: bool = False
    evaluation: bool = False  # a fraction, of few steps
    none: str = "not recorded"  # what it means that nothing was


CHARTS = (
    Chart("reward_mean", "Reward", "mean score, band: ± 1 standard deviation", fit=True),
    Chart(
        "accuracy",
        "Held-out accuracy",
        "fraction correct",
        evaluation=True,
        none="no evaluation yet, or the environment does not evaluate",
    ),
    Chart("completion_tokens_per_rollout", "Answer length", "sampled tokens per rollout"),
    Chart("entropy", "Entropy", "nats per trained token"),
    Chart("loss", "Loss", "weighted mean per token, before the update", fit=True),
    Chart("grad_norm", "Gradient norm", "L2 norm before clipping"),
    Chart("kl", "KL to the start model", "nats per token", fit=True, none="the loss has no KL term"),
    Chart(
        "logprob_diff",
        "Mismatch",
        "nats, trainer − sampler",
        {"mean": "logprob_diff_mean", "largest": "logprob_diff_max"},
        log=True,
    ),
    Chart("zero_variance_groups", "Groups without a signal", "groups per step: all scores equal"),
    Chart("cut_answers", "Cut answers", "answers per step that reached their limit of tokens"),
    Chart("throughput", "Throughput", "sampled tokens per second of a step"),
    Chart("step_s", "Time per step", "seconds"),
    Chart("sync_stall_s", "Sampling paused for a sync", "seconds per step"),
    Chart("staleness", "Staleness", "policy versions", {"mean": "staleness_mean", "largest": "staleness_max"}),
    Chart("failed_rollouts", "Failed rollouts", "rollouts per step"),
)
METRIC_WORDS = {
    "Rewards and evaluation": {
        "reward_mean": "Reward",
        "reward_std": "Reward, standard deviation",
        "accuracy": "Held-out accuracy",
        "accuracy_stderr": "Held-out accuracy, standard error",
    },
    "Loss": {
        "loss": "Loss",
        "pg_loss": "Policy gradient loss",
        "kl": "KL to the start model",
        "teacher_kl": "KL to the teacher",
        "entropy": "Entropy",
        "ratio_mean": "Probability ratio, mean",
        "ratio_max": "Probability ratio, largest",
        "ratio_clipped_frac": "Tokens beyond the clip",
        "ratio_capped_frac": "Ratios that were bounded",
        "importance_masked_frac": "Tokens dropped by importance",
        "importance_truncated_frac": "Tokens bounded by importance",
        "sft_loss": "Loss of examples",
        "dpo_loss": "Loss of pairs",
        "dpo_accuracy": "Pairs whose better answer gained",
        "dpo_margin": "Margin of pairs",
    },
    "Optimizer": {
        "lr": "Learning rate",
        "grad_norm": "Gradient norm",
        "grad_norm_max": "Gradient norm, largest",
        "updates": "Updates so far",
    },
    "Trainer and sampler": {
        "logprob_diff_mean": "Mismatch, mean",
        "logprob_diff_max": "Mismatch, largest",
        "sampler_kl": "KL of sampler and policy",
        "ratio_tokens_different": "Share of tokens whose bits differ",
        "bit_exact/differing_tokens": "Tokens whose bits differ",
        "bit_exact/tokens": "Tokens compared",
        "bit_exact/max_abs_diff": "Largest difference",
        "routing_disagreement": "Share of experts that differ",
        "staleness_mean": "Staleness, mean",
        "staleness_max": "Staleness, largest",
        "served_version": "Version served",
        "servers": "Servers that serve it",
    },
    "Batch": {
        "groups": "Groups",
        "rollouts": "Rollouts",
        "sequences": "Sequences",
        "completion_tokens": "Sampled tokens",
        "completion_tokens_per_rollout": "Answer length",
        "trained_tokens": "Trained tokens",
        "prompt_tokens": "Tokens of prompts",
        "prompt_tokens_cached": "Tokens of prompts in the KV cache",
        "tokens_read_again": "Tokens of answers, read again",
        "offline_tokens": "Tokens of examples",
        "zero_variance_groups": "Groups without a signal",
        "truncated_sequences": "Sequences that were cut",
        "cut_answers": "Cut answers",
        "failed_rollouts": "Failed rollouts",
        "rejected_groups": "Groups set aside",
        "bad_batches": "Batches skipped so far",
    },
    "Seconds": {
        "step_s": "Time per step",
        "generate_s": "Waiting for the batch",
        "train_s": "Training",
        "eval_wait_s": "Waiting for evaluations",
        "early_s": "Training before the batch was whole",
        "trainer_busy_s": "Trainer busy",
        "trainer_idle_s": "Trainer idle",
        "sampler_busy_s": "Samplers busy",
        "sampler_idle_s": "Samplers idle",
    },
    "Weights on their way": {
        "sync_stall_s": "Sampling paused",
        "sync_transfer_s": "Bytes in transit",
        "sync_apply_s": "Weights being changed",
        "sync_bytes": "Bytes sent",
        "sync_bytes_whole": "Bytes of all weights",
        "sync_words_changed": "Share of words that changed",
    },
}
