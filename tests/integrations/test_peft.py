"""Adapters of peft: what they leave frozen is neither sent nor kept."""

import copy

import pytest
import torch

import thinwire as tw
from thinwire.exchange.message import HEADER_NBYTES
from trainer_workers import Windows, adapted, model

H = 3


def team(method: tw.Method):
    workers = []
    for transport in tw.transport.in_process(2):
        net = adapted(model())
        optimizer = method.inner.build(net)
        workers.append((net, optimizer, tw.OuterLoop(net, optimizer, method, transport=transport)))
    return workers


def train(workers, first: int, last: int) -> None:
    for step in range(first, last):
        for number, (net, optimizer, outer) in enumerate(workers):
            tokens = torch.stack([Windows(number)[step]["input_ids"]])
            net(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.begin()
        for _, _, outer in workers:
            outer.finish()


def trained(net) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}


def test_only_adapters_travel_and_what_is_frozen_stays() -> None:
    workers = team(tw.presets.diloco(sync_every=H))
    frozen = copy.deepcopy({n: p for n, p in workers[0][0].named_parameters() if "lora" not in n})
    train(workers, 0, 2 * H)
    for net, _, outer in workers:
        assert all("lora" in name for name in trained(net))
        numel = sum(p.numel() for p in trained(net).values())
        assert outer.stats.sent_bytes == 2 * (HEADER_NBYTES + 4 * numel)
        assert outer.memory()["anchor"] == 4 * numel
        assert all(torch.equal(p, dict(net.named_parameters())[n]) for n, p in frozen.items())
    assert workers[0][2].digest() == workers[1][2].digest()


@pytest.mark.parametrize(
    "method",
    [
        tw.presets.muloco(bits=2, sync_every=H),
        tw.presets.streaming_diloco(sync_every=H, layers=2, tau=1),
    ],
    ids=["muloco", "streaming"],
)
def test_adapters_resume_bit_for_bit_and_are_evaluated_as_their_anchor(method) -> None:
    straight = team(method)
    train(straight, 0, 4)
    saved = [copy.deepcopy([part.state_dict() for part in worker]) for worker in straight]
    train(straight, 4, 3 * H)
    resumed = team(method)
    for worker, states in zip(resumed, saved, strict=True):
        for part, state in zip(worker, states, strict=True):
            part.load_state_dict(state)
    train(resumed, 4, 3 * H)
    net, _, outer = resumed[0]
    assert outer.digest() == straight[0][2].digest()
    live = copy.deepcopy(trained(net))
    with outer.evaluating():
        anchor = outer.consensus()
        assert all(torch.equal(p, anchor[name]) for name, p in trained(net).items())
    assert all(torch.equal(p, live[name]) for name, p in trained(net).items())


def test_other_base_models_and_adapters_that_come_later_are_refused() -> None:
    method = tw.presets.diloco(sync_every=1)
    first, second = tw.transport.in_process(2)
    tw.OuterLoop(adapted(model()), [], method, transport=first)
    other = adapted(model())
    with torch.no_grad():
        other.get_input_embeddings().weight[0, 0] += 1.0
    with pytest.raises(tw.MismatchError, match="frozen weights"):
        tw.OuterLoop(other, [], method, transport=second)
    net = adapted(model())
    outer = tw.OuterLoop(net, [], method)
    net.add_adapter("second", net.peft_config["default"])
    net.set_adapter("second")
    with pytest.raises(tw.ConfigurationError, match="frozen, unfrozen"):
        outer.step()
