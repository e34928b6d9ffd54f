"""The `process` command: `total_steps` groups into a JSONL file and a page to read, without API or trainer."""

import asyncio
from pathlib import Path

from atroposlib.envs.author_errors import ErrorBudget, giver, origin, shown
from atroposlib.envs.base_env import BaseEnv
from atroposlib.envs.errors import EnvError, ProcessError
from atroposlib.envs.html_report import write_html
from atroposlib.envs.payloads import Item
from atroposlib.envs.serve import wait_for_inference
from atroposlib.envs.server_handling.errors import ServerError
from atroposlib.logs import get_logger

log = get_logger(__name__)

FRUITLESS_ITEMS = 100
LONGEST_PAUSE_S = 10.0


async def process(env: BaseEnv) -> None:
    """Sample one group after the other, then render the page. Raises ProcessError after a hundred items that gave
    none.
    """
    if env.jsonl_writer is None or env.total_steps <= 0:
        raise ProcessError(
            "process needs --env.data_path_to_save_groups and --env.total_steps, the number of groups, above 0"
        )
    env.process_mode = True
    try:
        await wait_for_inference(env)
        await env.setup()
        budget = ErrorBudget(env.config.max_failed_items, giver(type(env)))
        for number in range(env.total_steps):
            await _one_group(env, budget)
            log.info("Group %d of %d is done", number + 1, env.total_steps)
    finally:
        await env.close()
    page = env.jsonl_writer.path.with_suffix(".html")
    write_html(env.jsonl_writer.path, page)
    log.info("Wrote %s and %s", env.jsonl_writer.path, page)


async def _one_group(env: BaseEnv, budget: ErrorBudget) -> None:
    """Try items until one gives a group that is accepted."""
    accepted = env.counts["groups_accepted"]
    failed = 0
    for _ in range(FRUITLESS_ITEMS):
        named = "that get_next_item was to give"
        try:
            item = env.backlog.pop() if env.backlog else await env.get_next_item()
            if item is None:
                raise ProcessError("the environment has no more items")
            named = shown(item)
            await _process_item(env, item)
        except EnvError:
            raise
        except Exception as error:
            log.exception("%s. Dropped the item %s", origin(error, budget.given_at), named)
            budget.note_failure(error, named)
            if isinstance(error, ServerError):
                await asyncio.sleep(min(LONGEST_PAUSE_S, 0.1 * 2**failed))
                failed += 1
        else:
            budget.note_success()
        if env.counts["groups_accepted"] > accepted:
            return
    without, dropped = env.counts["items_without_group"], env.counts["items_rejected"]
    reason = f"{without} had none, {dropped} groups were dropped for the reasons above"
    raise ProcessError(f"{FRUITLESS_ITEMS} items in a row gave no group: {reason}")


async def _process_item(env: BaseEnv, item: Item) -> None:
    try:
        groups = await env.groups_of(item)
        env.counts["items_without_group"] += not groups
        await env.handle_send_to_api(groups, item, do_send_to_api=False)
    finally:
        await env.cleanup()


def default_groups_path(name: str) -> Path:
    """Where groups go when nothing is configured."""
    return Path("data") / f"{name}.jsonl"
