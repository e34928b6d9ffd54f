"""docs/benchmarks/scale.md is what benchmarks/scale.py computes now, and proposes nothing that the plan refuses."""

import re

from atroposlib.api.settings import RunApiConfig
from benchmarks import scale
from example_trainer.bridges.direct import NCCL_SENDERS
from example_trainer.settings.bridges import Lora


def test_the_tables_are_those_that_the_program_computes() -> None:
    page = scale.PAGE.read_text()
    assert {*re.findall(r"<!-- computed: (\w+) -->", page)} == {*scale.TABLES}
    assert scale.with_tables(page) == page, "run python -m benchmarks.scale --write"


def test_a_number_of_the_text_that_a_table_has_not_is_computed_too() -> None:
    page, api = scale.PAGE.read_text(), scale.measured_api()

    def rates(row: str) -> list[float]:
        (found,) = re.findall(rf"^\| {row} \|(.*)\|$", page, re.M)
        return [float(cell.split()[0]) for cell in found.split("|")]

    memory, journal = rates("posted and fetched")[1], rates("posted and fetched")[3]
    assert f"**: {memory / journal:.1f} times as many groups (measured)" in page
    with_it, without = rates("posted")[3], rates("posted")[1]
    assert 0.45 < 1 - with_it / without < 0.55
    assert f"(computed: {with_it:.0f} groups/s\nwith it, {without:.0f} without)" in page
    assert f"fetching is {rates('fetched')[3] / rates('posted')[3]:.0f} times as fast as posting" in page
    assert f"it carries {scale.rounded(api.packed * api.tokens / 1e6)} million tokens/s (computed)" in page
    one_hundred, one_thousand = (scale.rounded(scale.share_of_core(count)) for count in (100, 1000))
    assert f"take {one_hundred} % of the API's core, and those of 1,000 take {one_thousand} %" in page
    assert f"takes {api.memory} times its bytes" in page
    assert f"1,024 groups of this size are {1024 * api.packed_bytes / 1e9:.2g} GB" in page


def test_what_the_pages_call_set_is_what_the_code_sets() -> None:
    page, settings = scale.PAGE.read_text(), RunApiConfig()
    operate = (scale.DOCS / "operate.md").read_text()
    assert f"| `--max-environments` | {settings.max_environments} |" in operate
    assert f"| `--max-connections` | {settings.max_connections}, or" in operate
    assert f"| {settings.max_requests_per_second:.0f} over 10 s, {settings.max_client_mb} in progress |" in operate
    assert f"| {settings.max_queued_groups}, {settings.max_queued_mb} |" in operate
    assert (NCCL_SENDERS, "more than eight\n  trainer ranks over NCCL (set)" in page) == (8, True)


def test_the_shares_of_bytes_and_time_are_computed_from_shapes_and_from_the_measurement() -> None:
    page, size, lora = scale.PAGE.read_text(), scale.MODELS["7B"], Lora()
    adapter = 4 * size.adapter(lora.r, lora.target_modules) / (2 * size.count)
    assert (lora.r, round(100 * adapter)) == (16, 1)
    assert "about a hundredth of the bytes (computed: 7B, rank 16, in float32)" in page
    text = (scale.DOCS / "benchmarks/speed.md").read_text()
    cell = r"\| ([\d.]+) \([\d.]+\)[^|]*"
    rows = re.findall(rf"^\| [^|]+ \| [12] {cell}{cell}{cell}\|$", text, re.M)
    assert len(rows) == 3
    ratios = [float(direct) / float(gathered) for _, gathered, direct in rows]
    assert f"took {min(ratios):.2f} to {max(ratios):.2f} times as long as a gathered one" in " ".join(page.split())


def test_a_refused_layout_has_no_number() -> None:
    rows = {row.split(" |")[0].strip("| "): row for row in scale.demand_table().splitlines()[2:]}
    for name, size in scale.MODELS.items():
        for gpus, cell in zip(scale.GPUS, rows[name].split(" | ")[1:], strict=False):
            fits = [scale.trainer_fits(size, gpus, tp) for tp in (1, scale.TP)]
            assert (cell == "refused") is not any(fits), (name, gpus)
            assert cell.endswith("*") is (fits == [False, True]), (name, gpus)
    assert not scale.trainer_fits(scale.MODELS["72B"], 8)
    assert "405B | 812 | 8 x 288 |" in scale.weight_table()  # and not 8 x 192
