"""The server's side of the weight bridge: one class per mode, selected by the trainer's offer.

base.py      Refused; Engine and Receiver, which each mode extends; Serving, the server as engines see it
session.py   which trainer may send weights: the session and its lease, for all modes
updater.py   the WeightUpdater_TP{r} thread of a worker: runs a session's Receiver, never writes live weights
broadcast.py, single_copy.py, adapters.py, reload.py   one mode each, with its own routes
"""

from atroposlib.wire.bridge import AdapterOffer, BroadcastOffer, Offer, ReloadOffer, SingleCopyOffer
from vllm_patching.engines import adapters, reload, session, single_copy
from vllm_patching.engines.adapters import AdapterEngine
from vllm_patching.engines.base import Engine, Receiver, Serving
from vllm_patching.engines.broadcast import BroadcastEngine, BroadcastReceiver
from vllm_patching.engines.reload import ReloadEngine, ReloadReceiver
from vllm_patching.engines.single_copy import SingleCopyEngine

ENGINES: dict[type[Offer], type[Engine]] = {
    BroadcastOffer: BroadcastEngine,
    SingleCopyOffer: SingleCopyEngine,
    AdapterOffer: AdapterEngine,
    ReloadOffer: ReloadEngine,
}
RECEIVERS: dict[type[Offer], type[Receiver]] = {BroadcastOffer: BroadcastReceiver, ReloadOffer: ReloadReceiver}
ROUTES = (*session.ROUTES, *single_copy.ROUTES, *adapters.ROUTES, *reload.ROUTES)


def engines_of(serving: Serving) -> dict[type[Offer], Engine]:
    """The engines that this server can run: those for adapters, those for whole weights, or none."""
    wanted = serving.max_lora_rank is not None
    return {
        offer: engine(serving)
        for offer, engine in ENGINES.items()
        if engine.takes_adapters == wanted and (wanted or serving.bridge_on)
    }
