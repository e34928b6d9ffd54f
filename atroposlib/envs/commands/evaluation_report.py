"""`evaluate` without `--samples`: the environment's own evaluation, once, with a table and a page of it.

env.evaluate() ──▶ metrics ──▶ table, printed and in table.txt
              └──▶ answers ──▶ samples.html                        files in --env.data_dir_to_save_evals
"""

import time
from pathlib import Path

from atroposlib.envs.authors import author_checks
from atroposlib.envs.errors import EnvError, RecordError
from atroposlib.envs.evaluation.evaluation import EvaluationFailed
from atroposlib.envs.evaluation.evaluation_metrics import TABLE, table
from atroposlib.envs.files.html_report import write_samples_html
from atroposlib.envs.files.records import WRITE_ELSEWHERE, tell_result, write_result
from atroposlib.envs.run.env_run import EnvRun
from atroposlib.envs.run.environment import Environment
from atroposlib.logs import get_logger, put

log = get_logger(__name__)

PAGE = "samples.html"


async def evaluate_once(env: Environment, run: EnvRun[Environment]) -> None:
    """Evaluate and report. Raises ServerError, EnvError for an evaluation without a result, and what the author's
    method raises.
    """
    started, failed = time.monotonic(), ""
    try:
        returned = await author_checks.metrics(env.evaluate)
    except EvaluationFailed as error:
        returned, failed = error.metrics, str(error)
    title = f"{run.display_name}, {env.server.model_name}"
    metrics = {**run.eval_results, **(returned or {})}
    if not metrics:
        log.warning("evaluate gave no metrics: return them, such as {'accuracy': 0.5}, or give them to evaluate_log")
    shown = table(title, {**metrics, "seconds": round(time.monotonic() - started, 1)})
    try:
        tell_result(shown)
        if run.unwritten is not None:
            raise run.unwritten
    finally:  # what was asked is not lost with a reader of the output
        if env.config.data_dir_to_save_evals is not None:
            folder = Path(env.config.data_dir_to_save_evals)
            write_result(folder / TABLE, shown.encode())
            _write_page(run, folder / PAGE, title, shown)
        run.write_held_out(None)
    if failed:
        raise EnvError(f"the evaluation failed: {failed}")


def _write_page(run: EnvRun[Environment], page: Path, title: str, shown: str) -> None:
    """An author chooses what a sample is: one that cannot be shown costs the page, not the evaluation."""
    try:
        write_samples_html(run.held_out, page, title, shown)
    except OSError as error:
        raise RecordError(f"cannot write {page}: {error.strerror}; {WRITE_ELSEWHERE}") from error
    except ValueError as error:
        log.warning("No page: %s", error)
    else:
        put(f"Every answer: {page}")
