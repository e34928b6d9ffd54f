"""The `process` command: writes `total_steps` groups to a JSONL file and a page, without API or trainer."""

import asyncio
import itertools

from atroposlib.clients.activity import ROLLOUTS_FAILED
from atroposlib.clients.waiting import backoff_s
from atroposlib.envs.authors.author_checks import settled
from atroposlib.envs.authors.author_errors import ErrorBudget, location, shown
from atroposlib.envs.commands.fake_servers import FakeServers, fake_servers
from atroposlib.envs.commands.loop_watch import LoopWatch
from atroposlib.envs.commands.remarks import Remarks, context_tokens, remarks_on_settings
from atroposlib.envs.errors import EnvError, ProcessError
from atroposlib.envs.files.html_report import page_beside, write_html
from atroposlib.envs.run.env_run import EnvRun
from atroposlib.envs.run.environment import Environment
from atroposlib.envs.server_handling.errors import ServerError
from atroposlib.errors import reading
from atroposlib.files import expect_regular
from atroposlib.logs import get_logger

log = get_logger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0


async def process(env: Environment) -> None:
    """Sample one group after the other, then render the page. Raises ProcessError after `max_fruitless_items` items
    in a row that gave none.
    """
    steps = env.config.total_steps
    if env.jsonl_writer is None or steps <= 0:
        raise ProcessError(
            "process needs --env.data_path_to_save_groups and --env.total_steps, the number of groups, above 0"
        )
    env.process_mode = True
    rows = env.jsonl_writer.path
    page = page_beside(rows)
    with reading(
        f"the page of the groups, {page}", ProcessError, remedy="choose another --env.data_path_to_save_groups"
    ):
        expect_regular(page)
    log.info("Sampling %d groups; the page to read will be %s", steps, page)
    async with env._env_run as run:
        await run.wait_for_inference()
        fakes = await fake_servers(env)
        await fakes.tell()  # set_up compares tokenizers where a server tells its context
        await run.set_up()
        context = context_tokens(env)
        for remark in remarks_on_settings(env, context):
            log.warning("%s", remark)
        remarks = Remarks(context)
        run.on_group = remarks.look
        budget = ErrorBudget(env.config.max_failed_items, run.errors)
        async with LoopWatch():
            for number in range(steps):
                await _one_group(run, budget, fakes)
                log.info("Group %d of %d is done", number + 1, steps)
        remarks.tell(steps)
    with reading(f"The groups are in {rows}, but their page is not in {page}", ProcessError):
        write_html(rows, page)
    log.info("Wrote the groups to %s and the page to %s", rows, page)


async def _one_group(run: EnvRun[Environment], budget: ErrorBudget, fakes: FakeServers) -> None:
    env, accepted = run.env, run.counts["groups_accepted"]
    failed, limit = 0, env.config.max_fruitless_items
    for _ in range(limit) if limit else itertools.count():
        named = "that get_next_item was to give"
        try:
            item = env.backlog.pop() if env.backlog else await settled(env.get_next_item())
            if item is None:
                method = getattr(env, "training_item", env.get_next_item)
                where = location(method) or method.__name__
                raise ProcessError(f"the environment has no more items: None came from {where}")
            named = shown(item)
            await fakes.tell_item(item)
            await run.handle(item)
        except EnvError:
            raise
        except Exception as error:
            budget.note_failure(error, named)
            if isinstance(error, ServerError):
                failed += 1
                await asyncio.sleep(backoff_s(failed, FIRST_PAUSE_S, LONGEST_PAUSE_S))
        else:
            budget.note_success()
        if run.counts["groups_accepted"] > accepted:
            return
    last = run.outcomes.last_drop
    # a rollout that failed says why itself, and not the method that groups come from
    giver = "" if set(run.outcomes.dropped) == {ROLLOUTS_FAILED} else run.errors.giver
    raise ProcessError(
        f"{limit} items in a row gave no group (limit --env.max_fruitless_items):"
        f" {run.counts['items_without_group']} gave none, and {run.counts['items_rejected']} groups were of no use."
        f" The last one: {last}{f' (groups come from {giver})' if giver and giver not in last else ''}"
    )
