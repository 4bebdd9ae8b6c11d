import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plan_runs import make_config_fixture, simulated_fixture  # noqa: F401
from thinwire import presets
from thinwire.cli import main
from thinwire.plan.job import SIGN_OF_LIFE_S

SIZED = "plan --parameters 10B --layers 48 --workers 2 --step-time 0.8s --bandwidth 10Gbit/s"
PLAN = [*SIZED.split(), "--latency", "50ms"]


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
    printed = capsys.readouterr().out
    assert "what all workers ask the store for, and the price" in printed
    assert "wall-clock" in printed
    # Workers that come and go ask for more.
    prices, run = ("--egress-price", "0", *prices[2:]), (*run[:-1], "diloco")
    (fixed,), (row,) = (
        planned(capsys, *PLAN, *prices, *run, *more)["methods"] for more in ((), ("--elastic",))
    )
    assert row["meeting_puts_per_round"] == workers + 3
    assert row["meeting_gets_per_round"] == 2 * (workers - 1)
    meeting = ((workers + 3) * 4.5 + 2 * (workers - 1) * 0.36) / 1e6
    round_s = row["step_s"] * row["sync_every_steps"]
    signs = math.ceil(workers * round_s / SIGN_OF_LIFE_S) * 4.5 / 1e6
    cost_per_round = fixed["cost_per_round"] + meeting + signs
    assert row["cost_per_round"] == pytest.approx(cost_per_round, rel=1e-12)
    rounds = row["steps"] / row["sync_every_steps"]
    signs = workers * row["wall_s"] / SIGN_OF_LIFE_S * 4.5 / 1e6
    assert row["cost"] == pytest.approx(fixed["cost"] + (rounds + 1) * meeting + signs, rel=1e-4)


def test_what_sealing_and_coding_add_is_planned(capsys) -> None:
    def added(method: str, *flags: str) -> tuple[dict, ...]:
        both = (planned(capsys, *PLAN, *ANY, "--methods", method, *more) for more in ((), flags))
        return tuple(found["methods"][0] | found for found in both)

    plain, sealed = added("streaming_diloco", "--sealed")
    more = sealed["up_bytes_per_round"] - plain["up_bytes_per_round"]
    assert more == 28 * plain["fragments"] > 28
    assert (plain["added_bytes_per_message"], sealed["added_bytes_per_message"]) == (0, 28)
    free, coded = added("diloco", "--encode-time", "7ns", "--decode-time", "2ns")
    # A round more of encoding 10B numbers, and of decoding those of two workers.
    more_s = 30 * 0.8 / coded["utilisation"] - 30 * 0.8 / free["utilisation"]
    assert more_s == pytest.approx(70 + 2 * 20, rel=1e-9)
    assert coded["limit"] == "coding"


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
        *("--sync-every", "7", "--methods", "ddp, muloco:bits=2", "--target", "0.5"),
    )
    assert found["model"] == {"name": "250k", "parameters": 246_336, "layers": 4}
    assert found["step_s"] == pytest.approx(6 * 246_336 * 64_000 / (8 * 989.4e12 * 0.5))
    link = {"topology": "star", "up_bits_per_s": 1e8, "down_bits_per_s": 8e9, "latency_s": 0.0}
    assert found["link"] == link
    assert found["target_utilisation"] == 0.5
    assert [row["sync_every_steps"] for row in found["methods"]] == [1, 7]
    assert [row["steps"] for row in found["methods"]] == [5209, 5209]
    link = planned(capsys, *PLAN, *ANY, "--methods", "diloco", "--up", "1Gbit/s")["link"]
    assert (link["up_bits_per_s"], link["down_bits_per_s"]) == (1e9, 1e10)


def test_tables_say_it_in_words(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*PLAN, *PRICED, "--accelerators-per-worker", "8"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "10B in 48 layers on 2 workers in a ring, 800 ms a step; 10 Gbit/s up and down, 50 ms one"
    )
    lines = {line.split()[0]: line for line in printed.splitlines()[::-1] if line.split()}
    assert lines["diloco"].split()[-2:] == ["bandwidth", "no"]
    assert "42.8 %" in lines["diloco"]
    assert lines["streaming_diloco"].split()[-2:] == ["compute", "yes"]
    assert "…" not in printed
    for told in ("day, EUR", "A day: 48 worker-hours", "--worker-size 8"):
        assert told in printed
    assert "what to run: busy 90 %" in printed
    assert "\n   method = tw.presets.streaming_muloco(" in printed
    assert printed.rstrip().endswith("compare at your own size.")


def test_nothing_is_advised_where_one_of_the_methods_that_were_asked_for_fits(capsys) -> None:
    assert main([*PLAN, "--methods", "diloco,streaming_diloco"]) == 0
    assert "what to run" not in capsys.readouterr().out
    assert main([*PLAN, "--methods", "diloco"]) == 0
    assert "what to run" in capsys.readouterr().out
    # One that does not fit is a line among others.
    both = (*PLAN, "--sync-every", "1", "--methods", "diloco,streaming_diloco")
    assert main([*both]) == 0
    printed = capsys.readouterr().out
    assert "\nstreaming_diloco: cannot " in printed
    assert "One of these would change it:\n  a link of " in printed
    good, bad = planned(capsys, *both, *ANY)["methods"]
    assert good.keys() == bad.keys()
    assert bad["error"].startswith("cannot ")
    assert (bad["fits"], bad["utilisation"]) == (False, None)


FAST = "plan --workers 2 --latency 1ms --step-time 1s --bandwidth 1Gbit/s"
RATED = "plan --parameters 1B --layers 4 --workers 2 --tokens-per-step 64k --bandwidth 1Gbit/s"
FROM = "plan --bandwidth 1Mbit/s --from RUN"
REFUSED = [
    (f"{SIZED} --bandwidth 1e-300bit/s --methods ddp", "so slow a link"),
    (f"{SIZED} --parameters 7", "7 parameters in 48 layers"),
    (f"{SIZED} --target 100%", "between 0 and 1"),
    (f"{SIZED} --methods ,", "method ''"),
    (f"{SIZED} --methods streaming_diloco --sync-every 1", "1 step"),
    (f"{SIZED} --model 150m", "both --model and --parameters, --layers"),
    (f"{SIZED} --accelerator H100", "both --step-time and --accelerator"),
    (f"{SIZED} --tokens 1B", "without --tokens-per-step"),
    (f"{SIZED} --put-price 5USD", "--put-price and without --egress-price"),
    (f"{SIZED} --elastic", "--elastic and without --egress-price"),
    (f"{SIZED} --worker-price 1USD --traffic-price 1EUR", "in different currencies"),
    (f"{SIZED} --egress-price 1EUR", "--put-price in USD, --get-price in USD, --egress-price in"),
    (f"{SIZED} --egress-price 1USD --topology ring", "--egress-price and --topology ring"),
    (FAST, "without --parameters or --model"),
    (f"{FAST} --parameters 1B", "--parameters and without --layers"),
    (f"{FAST} --layers 4", "without --parameters or --model"),
    (f"{FAST} --model org/no-such-model", "hf download org/no-such-model"),
    (FAST.replace("--workers 2", "--model 250k"), "without --workers"),
    (FAST.replace("--bandwidth", "--model 250k --up"), "--up and without --down or --bandwidth"),
    (FAST.replace("--bandwidth", "--model 250k --down"), "without --bandwidth or --up"),
    (RATED, "--step-time or --accelerator"),
    (RATED.replace("tokens-per-step 64k", "accelerator H100"), "without --tokens-per-step"),
    # What a run says already.
    (FROM, "2 workers shared a process and its cores"),
    (f"{FROM} --model 250k", "both --from and --model"),
    (f"{FROM} --topology star --step-time 1s", "both --from and --topology"),
]


@pytest.mark.parametrize(("typed", "message"), REFUSED)
def test_bad_input_is_one_clear_line(monkeypatch, capsys, simulated, typed, message) -> None:
    folder = simulated("diloco")
    monkeypatch.chdir(folder.parent)
    assert main(typed.replace("RUN", str(folder)).split()) in (1, 2)
    printed, error = capsys.readouterr()
    assert printed == ""
    assert re.fullmatch(r"error: cannot .* because .* do: .*\n", error)
    assert message in error


@pytest.mark.slow
def test_a_plan_starts_without_what_is_slow() -> None:
    code = "import sys; from thinwire.cli import main; "
    code += f"assert main({PLAN!r}) == 0; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"transformers", "datasets", "tokenizers", "torch.distributed.fsdp"}


@pytest.mark.slow_cases("sizes1", "sizes2")
@pytest.mark.parametrize("sizes", [("1e15", "1", "8"), ("1e14", "10", "8"), ("1T", "1k", "1k")])
def test_the_largest_plan_comes_to_an_end(sizes, capsys) -> None:
    """It lays out nothing: by a look at every row it takes minutes, and then all memory."""
    flags = zip(("--parameters", "--layers", "--workers"), sizes, strict=True)
    link = ("--step-time", "1s", "--bandwidth", "1Gbit/s")
    found = planned(capsys, "plan", *(text for flag in flags for text in flag), *link)
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
