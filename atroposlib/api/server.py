"""The batching API over HTTP: environments post scored groups, a trainer fetches batches of exactly its size.

All state is one `RolloutService` that only the event loop's thread touches. There is no CORS: web pages may not use the
API. `create_app` makes a new app; `app` is one without a journal, as `uvicorn atroposlib.api:app` serves it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from fastapi import FastAPI

from atroposlib.api.http import environment_routes, general_routes, trainer_routes
from atroposlib.api.http.admission import Admission
from atroposlib.api.http.auth import RequireToken, Tokens
from atroposlib.api.http.docs_page import add_docs_page
from atroposlib.api.http.messages import ERROR_REPLIES
from atroposlib.api.http.metrics import Measured, Metrics
from atroposlib.api.http.openapi import with_components
from atroposlib.api.journal import rescue
from atroposlib.api.journal.journal import Journal
from atroposlib.api.journal.journal_file import JournalDamaged
from atroposlib.api.service import RolloutService
from atroposlib.api.settings import RunApiConfig
from atroposlib.http_guard import HostGuard, OwnHosts
from atroposlib.logs import get_logger
from atroposlib.old_paths import moved_attribute

log = get_logger(__name__)


def create_app(
    settings: RunApiConfig | None = None, *, journal: Path | None = None, accept_loss: bool = False
) -> FastAPI:
    """An API with the state of its journal, or in memory and empty. Raises JournalError.

    A damaged journal is refused, or (`accept_loss`) brought to a state that is whole.
    """
    settings = settings or RunApiConfig()
    service = _service(settings, journal, accept_loss)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(title="AtroposLib API", description=__doc__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.metrics = Metrics(service)
    app.state.said = set()
    app.state.heavy_work = anyio.CapacityLimiter(1)
    for routes in (environment_routes, trainer_routes, general_routes):  # what is asked most stands first
        app.include_router(routes.router)
    if settings.legacy_gets is not False:
        app.include_router(trainer_routes.legacy_router)
    if settings.legacy_gets:
        app.include_router(general_routes.legacy_router)
    for kind, handler in ERROR_REPLIES.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(Admission, settings=settings)
    tokens = Tokens(settings)
    if tokens:
        app.add_middleware(RequireToken, tokens=tokens)
    app.add_middleware(HostGuard, hosts=OwnHosts.of(settings.host, settings.allowed_host), bears_token=tokens.role)
    app.add_middleware(Measured, service=service, metrics=app.state.metrics)
    with_components(app)
    add_docs_page(app)
    return app


def _service(settings: RunApiConfig, journal: Path | None, accept_loss: bool) -> RolloutService:
    try:
        return RolloutService(settings, None if journal is None else Journal(journal))
    except JournalDamaged as damage:
        if journal is None or not accept_loss:
            raise
        log.warning("%s", damage)
        log.warning("%s", rescue.accept_loss(journal))
        return RolloutService(settings, Journal(journal))


app = create_app()


def __getattr__(name: str) -> Any:
    return moved_attribute(__name__, name)
