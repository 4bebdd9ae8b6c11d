"""Where outer state rests, and what of it is counted."""

import threading

import pytest
import torch

from thinwire.errors import ConfigurationError
from thinwire.storage import Ledger, OnDevice, OnHost, StoredTensor, choose_storage

CPU = torch.device("cpu")
N_BYTES = 4 * 8


def test_on_the_device_only_the_device_is_counted() -> None:
    storage = OnDevice(CPU)
    kept = storage.keep(torch.ones(8))
    kept.store(kept.fetch().mul_(2))
    kept.release()
    assert kept.stored().tolist() == [2.0] * 8
    assert (storage.ledger.device_bytes, storage.ledger.host_bytes) == (N_BYTES, 0)
    kept.discard()
    assert storage.ledger.device_bytes == 0
    assert (storage.ledger.peak_device_bytes, storage.ledger.peak_host_bytes) == (N_BYTES, 0)


def test_on_the_host_only_what_is_fetched_takes_the_device() -> None:
    storage = OnHost(CPU)
    kept = [storage.zeros(8) for _ in range(3)]
    ledger = storage.ledger
    assert (ledger.device_bytes, ledger.host_bytes) == (0, 3 * N_BYTES)
    for each in kept:
        each.fetch().add_(1)
        each.release()
    assert [each.stored().sum().item() for each in kept] == [0.0] * 3  # released, not stored
    assert (ledger.device_bytes, ledger.peak_device_bytes) == (0, N_BYTES)
    kept[0].prefetch()
    kept[1].prefetch()
    assert (ledger.device_bytes, ledger.peak_device_bytes) == (2 * N_BYTES, 2 * N_BYTES)
    kept[0].fetch()
    storage.put_away()  # what was fetched is in use, and stays
    assert ledger.device_bytes == N_BYTES
    kept[0].discard()
    assert (ledger.device_bytes, ledger.host_bytes) == (0, 2 * N_BYTES)
    assert ledger.peak_host_bytes == 3 * N_BYTES


@pytest.mark.parametrize("place", [OnDevice, OnHost])
def test_what_is_dropped_counts_no_longer(place) -> None:
    storage = place(CPU)
    for _ in range(5):
        kept = storage.zeros(8)
        kept.fetch()
        del kept
    ledger = storage.ledger
    assert (ledger.device_bytes, ledger.host_bytes) == (0, 0)
    assert ledger.peak_device_bytes + ledger.peak_host_bytes in (N_BYTES, 2 * N_BYTES)


def test_places_may_share_a_ledger() -> None:
    ledger = Ledger()
    kept = [choose_storage(where, CPU, ledger).zeros(8) for where in (None, "cpu")]
    assert (ledger.device_bytes, ledger.host_bytes) == (N_BYTES, N_BYTES)
    del kept


def test_threads_may_fetch_while_others_keep() -> None:
    storage = OnHost(CPU)
    held = [storage.zeros(8) for _ in range(50)]
    errors: list[BaseException] = []

    def work(mine: list[StoredTensor]) -> None:
        try:
            for each in mine:
                each.fetch()
                each.release()
        except BaseException as error:
            errors.append(error)

    # One thread uses a tensor at a time: together they change the ledger that both count in.
    threads = [threading.Thread(target=work, args=(held[half::2],)) for half in range(2)]
    for thread in threads:
        thread.start()
    more = [storage.zeros(8) for _ in range(200)]
    for thread in threads:
        thread.join()
    assert not errors
    assert storage.ledger.host_bytes == 250 * N_BYTES
    del more


def test_another_device_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="keep outer state on 'meta'"):
        choose_storage("meta", CPU)
