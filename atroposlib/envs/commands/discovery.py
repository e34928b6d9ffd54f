"""Asks a vLLM server for its model when model_name or tokenizer_name is 'default'."""

import aiohttp
from pydantic import BaseModel

from atroposlib.addresses import refused_redirect
from atroposlib.clients.bearer import bearer
from atroposlib.clients.replies import BoundedResponse, ReplyTooLong
from atroposlib.clients.waiting import NotYet
from atroposlib.envs.commands.reporting import OWN_SET_UP, StartUp
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.errors import PeerError
from atroposlib.envs.limits.waits import wait_for_peer
from atroposlib.envs.server_handling.errors import NOT_FOUND, hint
from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerBaseline
from atroposlib.logs import get_logger

log = get_logger(__name__)

DEFAULT = "default"
REQUEST_TIMEOUT_S = 10.0


class ServedModel(BaseModel):
    """An entry of /v1/models: the name to ask for, and the directory or hub name that its weights come from."""

    id: str
    root: str | None = None


async def fill_in_models(
    config: BaseEnvConfig, servers: ServerBaseline | list[APIServerConfig], start: StartUp
) -> None:
    """Replace 'default' model and tokenizer names from the vLLM servers. Waits for them, up to
    `startup_timeout`, and notes in `start` what for.
    """
    entries = servers if isinstance(servers, list) else [servers]
    for server in entries:
        if (
            isinstance(server, APIServerConfig)
            and server.server_type == "vllm"
            and server.base_url
            and server.model_name == DEFAULT
        ):
            served = await served_model(server, config.startup_timeout, start)
            log.info("%s serves %s", server.base_url, served.id)
            server.model_name = served.id
            if server.tokenizer_name == "none":
                server.tokenizer_name = served.root or served.id
            start.waits_for = OWN_SET_UP
    if config.tokenizer_name == DEFAULT:
        config.tokenizer_name = entries[0].tokenizer_id
        log.info("Using the tokenizer of the served model, %s", config.tokenizer_name)


async def served_model(server: APIServerConfig, timeout_s: float, start: StartUp) -> ServedModel:
    """The first model that `server` lists. Raises PeerError after `timeout_s` seconds, or at once where the address is
    wrong.
    """
    url = f"{server.base_url.rstrip('/')}/models"
    headers = bearer(server.key, f"the api_key of {server.base_url}")

    async def attempt() -> ServedModel:
        try:
            return await listed()
        except NotYet as reason:
            start.waits_for = f"the inference server at {server.base_url} ({reason})"
            raise

    async def listed() -> ServedModel:
        try:
            async with session.get(url, headers=headers, allow_redirects=False) as reply:
                if redirected := refused_redirect(url, reply.status, reply.headers.get("Location")):
                    raise NotYet(redirected)
                if reply.status == NOT_FOUND:
                    remedy = hint(url, reply.status) or "; correct --openai.base_url: no server of models answers there"
                    raise PeerError(f"{url} replied {reply.status}{remedy}")
                if reply.status != 200:
                    raise NotYet(f"it replied {reply.status}")
                try:
                    return ServedModel.model_validate((await reply.json())["data"][0])
                except (IndexError, KeyError, TypeError, ValueError):  # of JSON, and of what it says
                    raise NotYet("its reply lists no model") from None
        except ReplyTooLong as error:
            raise PeerError(str(error)) from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NotYet(str(error) or f"no reply within {REQUEST_TIMEOUT_S:.0f} s") from None

    async with aiohttp.ClientSession(
        trust_env=False,
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        response_class=BoundedResponse,
    ) as session:
        return await wait_for_peer(
            "the name of the served model",
            url,
            attempt,
            timeout_s=timeout_s,
            remedy="start the inference server, correct --openai.base_url, or name --openai.model_name and"
            " --env.tokenizer_name",
        )
