"""How an engine waits for its worker on a CPU: asleep, over vLLM's own queue between the two."""

import threading
import time
from pathlib import Path

import zmq
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from vllm_patching.compat import vllm_engine

WAITED_S = 0.3


def test_a_process_that_waits_for_a_message_sleeps_and_gets_it() -> None:
    """vLLM's own would poll, for a second after each message: 0.3 s of CPU here."""
    vllm_engine.sleep_while_waiting()
    vllm_engine.sleep_while_waiting()  # vLLM may load a plugin twice
    writer = MessageQueue(1, 1)
    got: list[tuple[object, float]] = []

    def read() -> None:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        reader.wait_until_ready()
        for _ in range(2):
            before = time.thread_time()
            got.append((reader.dequeue(timeout=30), time.thread_time() - before))

    thread = threading.Thread(target=read)
    thread.start()
    writer.wait_until_ready()
    writer.enqueue("first")
    while not got:
        time.sleep(0.001)
    time.sleep(WAITED_S)
    writer.enqueue("second")
    thread.join(30)
    assert [message for message, _ in got] == ["first", "second"]
    assert got[1][1] < WAITED_S / 10


def test_every_message_wakes_its_reader_though_several_come_within_a_millisecond(tmp_path: Path) -> None:
    """Of vLLM's own notifications about every second was lost here, and its reader looks again after 5 s."""
    vllm_engine.sleep_while_waiting()
    address = f"ipc://{tmp_path}/notify"
    with zmq.Context() as of_writer, zmq.Context() as of_reader:
        writer, reader = SpinCondition(False, of_writer, address), SpinCondition(True, of_reader, address)
        while not reader.poller.poll(100):  # until it has subscribed
            writer.notify()
        reader.local_notify_socket.recv()
        for _ in range(200):
            writer.notify()
            assert reader.poller.poll(10_000)
            reader.local_notify_socket.recv()
        of_writer.destroy(linger=0)
        of_reader.destroy(linger=0)
