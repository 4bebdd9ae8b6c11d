"""Adapters of peft: what they leave frozen is neither sent nor kept."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model

import thinwire as tw
from thinwire.exchange.message import HEADER_NBYTES
from trainer_workers import Windows, is_anchor, model

H = 3


def adapted(net: torch.nn.Module) -> torch.nn.Module:
    """`net` with adapters of rank 2, which are all that is trained."""
    with warnings.catch_warnings():
        # peft asks transformers for a property by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        return get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def team(method: tw.Method):
    workers = []
    for transport in tw.transport.in_process(2):
        net = adapted(model())
        optimizer = method.inner.build(net)
        workers.append((net, optimizer, tw.OuterLoop(net, optimizer, method, transport=transport)))
    return workers


def train(workers, steps: int) -> None:
    for step in range(steps):
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
    train(workers, 2 * H)
    for net, _, outer in workers:
        assert all("lora" in name for name in trained(net))
        numel = sum(p.numel() for p in trained(net).values())
        assert outer.stats.sent_bytes == 2 * (HEADER_NBYTES + 4 * numel)
        assert outer.memory()["anchor"] == 4 * numel
        assert all(torch.equal(p, dict(net.named_parameters())[n]) for n, p in frozen.items())
    assert workers[0][2].digest() == workers[1][2].digest()
    train(workers, 1)
    net, _, outer = workers[0]
    live = copy.deepcopy(trained(net))
    with outer.evaluating():
        assert is_anchor(net, outer)
    assert not is_anchor(net, outer)
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
