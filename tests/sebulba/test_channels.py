"""Threads that wait for each other: bounded, in order, and never beyond the end of a run."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from podracer.errors import Closed
from podracer.sebulba.channels import Channel, ParamsStore
from podracer.types import ActorParams
from tests.support import hosts


def in_thread(function, *args):
    """Runs `function` in a thread; returns the thread and a list that gets its result or exception."""
    outcome = []

    def call():
        try:
            outcome.append(function(*args))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, outcome


def test_messages_come_in_order_and_by_source():
    channel = Channel(2)
    for source, content in ((1, "a"), (0, "b"), (1, "c")):
        channel.put(source, content)
    assert len(channel) == 3
    assert channel.get(0.1, source=0) == "b"
    assert channel.get(0.1) == "a"
    assert channel.get(0.01, source=0) is None
    assert channel.get(0.1, source=1) == "c"


def test_a_full_channel_holds_up_its_producers():
    channel = Channel(1)
    channel.put(0, "a")
    channel.put(1, "of another")
    thread, outcome = in_thread(channel.put, 0, "b")
    time.sleep(0.05)
    assert thread.is_alive()
    assert channel.get(0.1) == "a"
    thread.join(2)
    assert outcome == [None]
    assert [channel.get(0.1), channel.get(0.1)] == ["of another", "b"]


def test_a_message_ends_the_wait():
    channel = Channel(1)
    thread, outcome = in_thread(channel.get, 60.0)
    time.sleep(0.05)
    channel.put(0, "a")
    thread.join(2)
    assert outcome == ["a"]


def test_closing_wakes_everyone():
    channel, store = Channel(1), ParamsStore([jax.devices()[0]], keep=1)
    channel.put(0, "a")
    waiting = [in_thread(channel.put, 0, "b"), in_thread(store.wait, 7)]
    empty = Channel(1)
    getting = in_thread(empty.get, 60.0)
    time.sleep(0.05)
    for thing in (channel, store, empty):
        thing.close()
    for thread, outcome in waiting:
        thread.join(2)
        assert isinstance(outcome[0], Closed)
    getting[0].join(2)
    assert getting[1] == [None]
    with pytest.raises(Closed):
        channel.put(0, "c")
    assert channel.get(0.1) == "a", "what is there is not lost"


def test_published_parameters_stay_as_they_were():
    device = jax.devices()[0]
    store = ParamsStore([device], keep=2)
    held = []
    for number in range(5):
        store.publish(number, ActorParams({"w": jnp.full(3, number)}, jnp.int32(2 * number)))
        held.append(store.newest())
    assert [int(published.params[device].params["w"][0]) for published in held] == [0, 1, 2, 3, 4]
    assert [published.version for published in held] == [0, 2, 4, 6, 8]
    assert [version.number for version in store.snapshot()] == [3, 4]
    assert int(store.wait(3).params[device].params["w"][0]) == 3


def test_waiting_for_a_version():
    device = jax.devices()[0]
    store = ParamsStore([device], keep=2)
    thread, outcome = in_thread(store.wait, 1)
    store.publish(0, ActorParams({"w": jnp.zeros(1)}, jnp.int32(0)))
    assert not hosts.within(0.05, lambda: bool(outcome))
    store.publish(1, ActorParams({"w": jnp.ones(1)}, jnp.int32(1)))
    thread.join(2)
    assert float(outcome[0].params[device].params["w"][0]) == 1.0
