"""Which CPU cores each service gets: `layout.cores` of a run file.

    cores: {vllm: 4, trainer: 0-3, environments: [8]}

A set names cores (`0-3,8`, or a list). A number takes that many of the cores that no set names, lowest first. Sets
may overlap where services take turns. `auto` pins nothing.
"""

from itertools import chain
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from atropos_launcher.run_file.servers import is_for_each
from atroposlib.config import Config
from example_trainer.settings.cpu_cores import distinct, parse_cores

Asked = Literal["auto"] | int | list[int]


def _one_set(value: object) -> object:
    """`0-3`, `[0, 1]` and `[0-1, 4]` as a list; a number and `auto` as they are."""
    if value == "auto":
        return value
    if isinstance(value, str):
        return [*parse_cores(value)]
    parts = value if isinstance(value, list) else []
    if parts and all(isinstance(part, int | str) and not isinstance(part, bool) for part in parts):
        return [*distinct([*chain(*(parse_cores(str(part)) for part in parts))])]
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ValueError("expected auto, a number of cores from 1 on, or a set such as 0-3,8 (core 0 alone is [0])")


def _set_for_each_server(value: object) -> object:
    return [_one_set(part) for part in value] if is_for_each(value) else _one_set(value)


class CoreLayout(Config):
    """CPU cores of each service: a number of them, or a set."""

    vllm: Annotated[Asked | list[list[int]], BeforeValidator(_set_for_each_server)] = Field(
        "auto", description="of all vLLM servers, or a list with a set for each"
    )
    trainer: Annotated[Asked, BeforeValidator(_one_set)] = Field("auto", description="of all trainer ranks")
    teacher: Annotated[Asked, BeforeValidator(_one_set)] = Field("auto", description="of the teacher's vLLM server")
    environments: Annotated[Asked, BeforeValidator(_one_set)] = Field("auto", description="of every environment")
    api: Annotated[Asked, BeforeValidator(_one_set)] = Field("auto", description="of the batching API")
