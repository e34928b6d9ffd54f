"""`display_metrics_table`: the results of an evaluation on the console."""

from collections.abc import Mapping

from atroposlib.envs.files.records import markdown_table


def display_metrics_table(task_name: str, metrics: Mapping[str, float], start_time: float, end_time: float) -> None:
    """Print `metrics` as a Markdown table, without their prefix `eval/`. Times are seconds."""
    print(f"\n{task_name}, {end_time - start_time:.2f} s\n")
    print(markdown_table({name.removeprefix("eval/").replace("_", " "): value for name, value in metrics.items()}))
