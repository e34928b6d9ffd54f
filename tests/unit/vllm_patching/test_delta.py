"""Weights as what has changed in them: lossless for any words, never more than whole, refused where it does not fit."""

import contextlib
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.unit.vllm_patching.test_transport import trainer_groups, worker_groups
from vllm_patching import delta, transport
from vllm_patching.delta import Form

TIMEOUT_S = 20.0
HEADER = 24  # bytes
NAN = torch.tensor([0x7FC0, 0x7FC1, 0xFFC0, 0xFFFF, 0x7F81], dtype=torch.int32).to(torch.int16)  # payloads of bfloat16


def words(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator, dtype=torch.int16)


def changed(base: Tensor, places: Tensor | list[int]) -> Tensor:
    now = base.clone()
    now[places] ^= 1
    return now


def some(count: int, share: float) -> Tensor:
    return (torch.rand(count, generator=torch.Generator().manual_seed(7)) < share).nonzero().squeeze(1)


def restored(now: Tensor, base: Tensor) -> tuple[Form, Tensor]:
    """What a receiver of `base` makes of the encoded `now`."""
    encoded = delta.encode(now, base)
    assert encoded.words.nbytes + encoded.places.nbytes <= now.nbytes
    assert encoded.changed == int((now != base).sum())
    if encoded.form is Form.WHOLE:
        return encoded.form, encoded.words
    found = base.clone()
    found[delta.decode(encoded.form, encoded.places, len(encoded.words), len(now))] = encoded.words
    return encoded.form, found


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 254, 255, 256, 257, 511, 4096, 100_003])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.1, 0.13, 0.5, 0.93, 0.99, 1.0])
def test_every_word_is_restored_whatever_has_changed(count: int, share: float) -> None:
    base = words(count, 1)
    now = changed(base, some(count, share))
    _, found = restored(now, base)
    assert torch.equal(found, now)


@pytest.mark.parametrize("at", [[0], [254], [255], [256], [509], [510], [511], [99_999], [0, 255, 511, 99_999]])
def test_gaps_of_any_length_are_restored(at: list[int]) -> None:
    base = words(100_000, 2)
    form, found = restored(changed(base, at), base)
    assert form is Form.GAPS
    assert torch.equal(found, changed(base, at))


def test_the_form_is_the_smallest() -> None:
    base = words(80_000, 3)
    forms = {share: restored(changed(base, some(80_000, share)), base)[0] for share in (0.001, 0.05, 0.2, 0.8, 0.97)}
    assert forms == {0.001: Form.GAPS, 0.05: Form.GAPS, 0.2: Form.BITMAP, 0.8: Form.BITMAP, 0.97: Form.WHOLE}


def test_words_that_are_not_numbers_are_compared_and_restored_bit_by_bit() -> None:
    base = NAN.repeat(2000)
    assert base.view(torch.bfloat16).isnan().all()
    form, found = restored(base.roll(1), base)
    assert torch.equal(found, base.roll(1))
    same = delta.encode(base, base.clone())  # NaN is not equal to itself, its words are
    assert (len(same.words), len(same.places)) == (0, 0)
    one = changed(base, [777])
    form, found = restored(one, base)
    assert (form, torch.equal(found, one)) == (Form.GAPS, True)


def test_zeros_of_both_signs_differ() -> None:
    base = torch.zeros(1000, dtype=torch.bfloat16)
    form, found = restored((-base).view(torch.int16), base.view(torch.int16))
    assert form is Form.WHOLE
    assert found.view(torch.bfloat16).signbit().all()


@pytest.mark.parametrize(
    ("form", "places", "count"),
    [
        (Form.GAPS, [255, 255, 254], 1),  # beyond the end
        (Form.GAPS, [12], 1),  # just behind the last
        (Form.GAPS, [3, 3], 1),  # more places than words
        (Form.GAPS, [255], 1),  # none at all
        (Form.BITMAP, [0, 128], 1),  # in the padding of the last byte
        (Form.BITMAP, [3, 0], 1),
    ],
)
def test_places_that_no_trainer_sends_are_refused(form: Form, places: list[int], count: int) -> None:
    with pytest.raises(transport.TransportError, match=r"places of changed words came for 1 words, in a piece of 12"):
        delta.decode(form, torch.tensor(places, dtype=torch.uint8), count, 12)


class Link:
    """A trainer and a worker over Gloo, and the worker's copy of the weights."""

    def __init__(self, nbytes: int, timeout_s: float = TIMEOUT_S) -> None:
        store, port = transport.host_store("127.0.0.1", 0, TIMEOUT_S)
        session = uuid.uuid4().hex
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(worker_groups, port, session, timeout_s)
            self.trainer = trainer_groups(store, session, timeout_s)
            self.worker = joining.result()
        self.sent_last, self.staging = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))

    def transfer(self, now: Tensor, *, whole: bool = False) -> delta.Sent:
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(delta.receive, self.worker, self.staging, has_base=not whole)
            sent = delta.send(self.trainer, now, self.sent_last, whole=whole)
            receiving.result()
        assert torch.equal(self.staging, now)
        assert torch.equal(self.sent_last, now)
        return sent


def test_versions_follow_one_another_over_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "PIECE", 20_000)
    count = 35_001  # four pieces, the last one odd
    link, pieces = Link(2 * count), 4
    now = words(count, 4)
    first = link.transfer(now.view(torch.uint8), whole=True)
    assert first == delta.Sent(2 * count + pieces * HEADER, count, count)
    again = link.transfer(now.view(torch.uint8))
    assert again == delta.Sent(pieces * HEADER, 0, count)
    for places, at_most in ((some(count, 0.01), 0.05), (some(count, 0.3), 0.45), (torch.arange(count), 1.01)):
        now = changed(now, places)
        sent = link.transfer(now.view(torch.uint8))
        assert (sent.changed, sent.words) == (len(places), count)
        assert sent.nbytes < at_most * 2 * count
    only_last = changed(now, [count - 1])
    assert link.transfer(only_last.view(torch.uint8)) == delta.Sent(sent_for_one(count), 1, count)


def sent_for_one(count: int) -> int:
    """Bytes for one changed word at the end of pieces of 10,000: its word, and a gap to the end of its piece."""
    gap = (count - 1) % 10_000
    return 4 * HEADER + 2 + gap // delta.SKIP + 1


def test_float32_weights_travel_as_halves_of_which_the_upper_ones_stay() -> None:
    now = torch.randn(50_000, generator=torch.Generator().manual_seed(5))
    link = Link(now.nbytes)
    link.transfer(now.view(torch.uint8), whole=True)
    sent = link.transfer((now * (1 + 1e-6)).view(torch.uint8))
    assert 0.4 < sent.changed / sent.words < 0.52
    assert sent.nbytes < 0.6 * now.nbytes


@pytest.mark.parametrize("form", [Form.GAPS, Form.BITMAP])
def test_words_without_their_places_are_refused(form: Form) -> None:
    link = Link(2000)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(delta.receive, link.worker, link.staging, has_base=True)
        link.trainer.announce(torch.tensor([form, 2, 0]))
        link.trainer.broadcast(torch.ones(2, dtype=torch.int16).view(torch.uint8))
        with pytest.raises(transport.TransportError, match="0 places of changed words came for 2 words"):
            receiving.result()


def test_a_worker_without_the_base_refuses_what_has_changed_since_it() -> None:
    link = Link(2000, timeout_s=2.0)
    now = changed(link.sent_last.view(torch.int16), [3]).view(torch.uint8)
    with ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(delta.receive, link.worker, link.staging, has_base=False)
        sending = pool.submit(_quietly, link, now)
        with pytest.raises(transport.TransportError, match=r"a piece of 1000 words came as form 1, 1 words, 1 bytes"):
            receiving.result(TIMEOUT_S)
        sending.result(TIMEOUT_S)
    assert not link.staging.any()


def _quietly(link: Link, now: Tensor) -> None:
    with contextlib.suppress(RuntimeError):  # nobody takes the words
        delta.send(link.trainer, now, link.sent_last, whole=False)
