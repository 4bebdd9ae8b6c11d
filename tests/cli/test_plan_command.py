import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plan_runs import corpus, simulated, tiny
from thinwire import presets
from thinwire.cli import main
from thinwire.plan.job import SIGN_OF_LIFE_S

__all__ = ["corpus", "simulated", "tiny"]

PLAN = ["plan", "--parameters", "10B", "--layers", "48", "--workers", "2", "--step-time", "0.8s"]
PLAN += ["--bandwidth", "10Gbit/s", "--latency", "50ms"]
ANY = ("--target", "1%")  # which whatever is asked for reaches: nothing is advised
TOKENS = ("--tokens-per-step", "64k", "--tokens", "300B")
PRICED = ("--worker-price", "2.5EUR", "--traffic-price", "0.1EUR")


def planned(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_a_store_charges_is_planned(capsys) -> None:
    prices = ("--egress-price", "$0.09", "--put-price", "4.5USD", "--get-price", "0.36USD")
    run = (*ANY, *TOKENS, "--methods", "streaming_diloco")
    found = planned(capsys, *PLAN, *prices, *run)
    (row,), workers = found["methods"], found["workers"]
    assert found["link"]["topology"] == "star"
    assert row["puts_per_round"] == row["fragments"]
    assert row["gets_per_round"] == (workers - 1) * row["fragments"]
    requests = (row["puts_per_round"] * 4.5 + row["gets_per_round"] * 0.36) / 1e6
    cost = workers * (row["down_bytes_per_round"] / 1e9 * 0.09 + requests)
    assert row["cost_per_round"] == pytest.approx(cost, rel=1e-12)
    rounds = row["down_bytes"] / row["down_bytes_per_round"]
    assert row["cost"] == pytest.approx(rounds * cost, rel=1e-4)
    assert row["meeting_puts_per_round"] == row["meeting_gets_per_round"] == 0
    assert main([*PLAN, *prices, *run]) == 0
    assert "what all workers ask the store for, and the price" in capsys.readouterr().out
    # Workers that come and go ask for more.
    prices, run = ("--egress-price", "0", *prices[2:]), (*run[:-1], "diloco")
    (fixed,), (row,) = (
        planned(capsys, *PLAN, *prices, *run, *more)["methods"] for more in ((), ("--elastic",))
    )
    assert row["meeting_puts_per_round"] == workers + 2
    assert row["meeting_gets_per_round"] == 2 * (workers - 1)
    meeting = ((workers + 2) * 4.5 + 2 * (workers - 1) * 0.36) / 1e6
    round_s = row["step_s"] * row["sync_every_steps"]
    signs = math.ceil(workers * round_s / SIGN_OF_LIFE_S) * 4.5 / 1e6
    cost_per_round = fixed["cost_per_round"] + meeting + signs
    assert row["cost_per_round"] == pytest.approx(cost_per_round, rel=1e-12)
    rounds = row["steps"] / row["sync_every_steps"]
    signs = workers * row["wall_s"] / SIGN_OF_LIFE_S * 4.5 / 1e6
    assert row["cost"] == pytest.approx(fixed["cost"] + (rounds + 1) * meeting + signs, rel=1e-4)


FIELDS = {
    "": "format model workers added_bytes_per_message step_s link tokens_per_step_per_worker "
    "tokens target_utilisation methods run advice",
    "model": "name parameters layers",
    "link": "topology up_bits_per_s down_bits_per_s latency_s",
    "methods": "method sync_every_steps tau_steps fragments exchanges up_bytes_per_round "
    "down_bytes_per_round times_fewer puts_per_round gets_per_round meeting_puts_per_round "
    "meeting_gets_per_round cost_per_round cost_per_day cost up_bytes_per_day "
    "down_bytes_per_day peak_up_bytes_per_step peak_up_bits_per_s utilisation limit fits "
    "step_s target_bits_per_s required_bits_per_s tokens_per_day steps wall_s up_bytes "
    "down_bytes error",
    "required_bits_per_s": "0.5 0.8 0.9 0.95 0.99",
    "advice": "target_utilisation recommended closest changes loss_source currency",
    "recommended": "method python forecast loss_share bill",
    "bill": "is_of_run hours worker_hours waiting_hours traffic_bytes cost waiting_cost",
}


def names_in(value: dict | list) -> Iterator[str]:
    """Of all fields, however deep."""
    if isinstance(value, dict):
        yield from value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from names_in(each)


def test_the_fields_of_the_json_are_frozen(capsys) -> None:
    """Others read them: a new one is fine, a lost or a changed one is a new format."""
    found = planned(capsys, *PLAN, *TOKENS, *PRICED)
    assert found["format"] == 3
    first, ddp = found["advice"]["recommended"][0], found["methods"][0]
    assert first["forecast"].keys() == ddp.keys()
    # of ddp, which waits 50 ms after every step of 800
    assert ddp["required_bits_per_s"]["0.95"] is None
    for name, fields in FIELDS.items():
        value = {"": found, **found, **found["advice"], **ddp, **first}[name]
        assert {*fields.split()} == {*(value[0] if isinstance(value, list) else value)}, name
    types = {"up_bytes": int, "utilisation": float, "limit": str, "fits": bool}
    types["cost"] = type(None)
    assert {name: type(ddp[name]) for name in types} == types
    assert [row["method"] for row in found["methods"]] == list(presets.names())
    assert found["advice"]["currency"] == "EUR"
    costs = first["bill"]
    traffic = costs["traffic_bytes"] / 1e9 * 0.1
    assert costs["cost"] == pytest.approx(2.5 * costs["worker_hours"] + traffic)
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    assert {*names_in(found)} - {*re.findall(r"[`\"]([\w.]+)[`\"]", page)} == set()


def test_flags_reach_the_plan(capsys) -> None:
    found = planned(
        capsys,
        *("plan", "--model", "250k", "--workers", "3", "--accelerator", "h100", "--mfu", "50%"),
        *("--accelerators-per-worker", "8", "--tokens-per-step", "64k", "--tokens", "1B"),
        *("--up", "100Mbps", "--down", "1GB/s", "--latency", "0", "--topology", "star"),
        *("--sync-every", "7", "--methods", "ddp, muloco:bits=2", "--target", "0.5", "--sealed"),
    )
    assert found["model"] == {"name": "250k", "parameters": 246_336, "layers": 4}
    assert found["step_s"] == pytest.approx(6 * 246_336 * 64_000 / (8 * 989.4e12 * 0.5))
    link = {"topology": "star", "up_bits_per_s": 1e8, "down_bits_per_s": 8e9, "latency_s": 0.0}
    assert found["link"] == link
    assert (found["target_utilisation"], found["added_bytes_per_message"]) == (0.5, 28)
    assert [row["sync_every_steps"] for row in found["methods"]] == [1, 7]
    assert [row["steps"] for row in found["methods"]] == [5209, 5209]
    coding = ("--encode-time", "7ns", "--decode-time", "2ns")
    free, coded = (
        planned(capsys, *PLAN, *ANY, "--methods", "diloco", "--up", "1Gbit/s", *more)
        for more in ((), coding)
    )
    assert free["link"] == coded["link"] | {"up_bits_per_s": 1e9, "down_bits_per_s": 1e10}
    # A round more of encoding 10B numbers, and of decoding those of two workers.
    round_s = [30 * 0.8 / its["methods"][0]["utilisation"] for its in (free, coded)]
    assert round_s[1] - round_s[0] == pytest.approx(70 + 2 * 20, rel=1e-9)


# More of what is printed is compared with pages of the documentation.
def test_prices_and_ranks_are_told_on_a_narrow_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    many = ("--accelerators-per-worker", "8", "--topology", "star")
    assert main([*PLAN, *PRICED, *many]) == 0
    printed = capsys.readouterr().out
    begins = "1  torchrun --nproc-per-node 8 -m thinwire join s3://BUCKET/RUN --recipe paper "
    for told in ("day, EUR", "A day: 48 worker-hours", begins, " --workers 2 --worker-size 8 "):
        assert told in printed
    assert "…" not in printed


def test_nothing_is_advised_where_one_of_the_methods_that_were_asked_for_fits(capsys) -> None:
    assert main([*PLAN, "--methods", "diloco,streaming_diloco"]) == 0
    assert "what to run" not in capsys.readouterr().out
    assert main([*PLAN, "--methods", "diloco"]) == 0
    assert "what to run" in capsys.readouterr().out
    # What it costs is told nevertheless.
    assert main([*PLAN, *PRICED, "--methods", "streaming_diloco"]) == 0
    printed = capsys.readouterr().out
    assert "what to run" not in printed
    table = printed.partition("all workers, a day")[2].partition("bandwidth in bit/s")[0]
    assert re.search(r"EUR\s+─+\s+streaming_diloco +48 +0 +36 TB 3,724", table)
    # One that does not fit is a line among others.
    both = [*PLAN, "--sync-every", "1", "--methods", "diloco,streaming_diloco"]
    assert main(both) == 0
    printed = capsys.readouterr().out
    assert "\nstreaming_diloco: cannot " in printed
    assert "One of these would change it:\n  a link of " in printed
    good, bad = planned(capsys, *both, *ANY)["methods"]
    assert good.keys() == bad.keys()
    assert bad["error"].startswith("cannot ")
    assert (bad["fits"], bad["utilisation"]) == (False, None)


def test_a_run_too_short_for_ten_rounds_is_named_and_that_of_from_is_not_counted(
    capsys, simulated
) -> None:
    short = "plan --model 250k --workers 2 --step-time 0.1s --bandwidth 100Mbit/s --latency 20ms"
    assert main([*short.split(), "--tokens-per-step", "1024", "--tokens", "80k"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "The run has 40 steps, so that only rounds of up to 4 were tried, 10 of them" in told
    assert "No bandwidth" not in told
    # With an H that has ten rounds, it is not the run that is short.
    few = ("--tokens-per-step", "1024", "--tokens", "80k", "--sync-every", "4", "--target", "99.9%")
    assert main([*short.split(), *few]) == 0
    assert "only rounds of" not in " ".join(capsys.readouterr().out.split())
    link = ("--bandwidth", "100Mbit/s", "--latency", "20ms", "--step-time", "0.1s")
    assert main(["plan", "--from", str(simulated("diloco")), *link, "--target", "99%"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "what to run: busy 99 % of the time or more" in told
    assert "only rounds of" not in told


@pytest.mark.slow
def test_a_plan_starts_without_what_is_slow() -> None:
    code = "import sys; from thinwire.cli import main; "
    code += f"assert main({PLAN!r}) == 0; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"transformers", "datasets", "tokenizers", "torch.distributed.fsdp"}


@pytest.mark.slow_cases("sizes1", "sizes2")
@pytest.mark.parametrize("sizes", [("1e15", 1, 8), ("1e14", 10, 8), ("1T", "1k", "1k")])
def test_the_largest_plan_comes_to_an_end(sizes, capsys) -> None:
    """It lays out nothing: by a look at every row it takes minutes, and then all memory."""
    size = "plan --step-time 1s --bandwidth 1Gbit/s --parameters {} --layers {} --workers {}"
    found = planned(capsys, *size.format(*sizes).split())
    assert {row["method"] for row in found["methods"]} == set(presets.names())


def test_a_run_is_planned_over_another_link(capsys, simulated) -> None:
    out = simulated("diloco")
    summary = json.loads((out / "summary.json").read_text())
    run = ("plan", "--from", str(out), "--bandwidth", "1Mbit/s", "--step-time", "0.1s", *ANY)
    found = planned(capsys, *run, "--latency", "20ms")
    assert (found["workers"], found["step_s"], found["link"]["topology"]) == (2, 0.1, "ring")
    (row,) = found["methods"]
    assert (row["method"], row["sync_every_steps"], row["steps"]) == ("diloco", 5, 13)
    assert row["up_bytes"] == summary["sent_bytes_per_worker"] == found["run"]["sent_nbytes"]
    assert row["down_bytes"] == summary["received_bytes_per_worker"]
    # 13 steps, and three exchanges of which each has its bits and two latencies.
    bits_s = 8 * row["up_bytes"] / 1e6
    assert 1.3 + bits_s + 3 * 0.04 < row["wall_s"] < 1.3 + 1.1 * bits_s + 3 * 0.05
    assert found["run"]["steps"] == 13
    others = ("--methods", "muloco:bits=2,ddp", "--tokens", "1M", "--workers", "5")
    found = planned(capsys, *run, *others)
    assert [row["method"] for row in found["methods"]] == ["muloco:bits=2", "ddp"]
    assert (found["workers"], found["tokens"]) == (5, 1_000_000)
    assert main([*run]) == 0
    assert capsys.readouterr().out.startswith("the run: 13 steps of diloco in ")
