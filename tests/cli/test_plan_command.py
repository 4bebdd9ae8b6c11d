import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plan_runs import make_config_fixture, simulated_fixture  # noqa: F401
from thinwire import presets
from thinwire.cli import main
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import traffic

MODEL = ["--parameters", "10B", "--layers", "48"]
REST = ["--workers", "2", "--step-time", "0.8s", "--bandwidth", "10Gbit/s", "--latency", "50ms"]
PLAN = ["plan", *MODEL, *REST]


def planned(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_a_store_charges_is_planned(capsys) -> None:
    prices = ("--egress-price", "$0.09", "--put-price", "4.5USD", "--get-price", "0.36USD")
    run = ("--tokens-per-step", "64k", "--tokens", "300B", "--methods", "streaming_diloco")
    found = planned(capsys, *PLAN, *prices, *run)
    (row,), workers = found["methods"], found["workers"]
    assert found["link"]["topology"] == "star"
    assert row["puts_per_round"] == row["fragments"]
    assert row["gets_per_round"] == (workers - 1) * row["fragments"]
    requests = (row["puts_per_round"] * 4.5 + row["gets_per_round"] * 0.36) / 1e6
    cost = workers * (row["received_bytes_per_round"] / 1e9 * 0.09 + requests)
    assert row["cost_per_round"] == pytest.approx(cost, rel=1e-12)
    rounds = row["received_bytes"] / row["received_bytes_per_round"]
    assert row["cost"] == pytest.approx(rounds * cost, rel=1e-4)
    assert row["meeting_puts_per_round"] == row["meeting_gets_per_round"] == 0
    assert main([*PLAN, *prices, *run]) == 0
    assert "what all workers ask the store for, and the price" in capsys.readouterr().out


def test_what_workers_that_come_and_go_ask_a_store_for_is_planned(capsys) -> None:
    prices = ("--egress-price", "0", "--put-price", "4.5USD", "--get-price", "0.36USD")
    run = ("--tokens-per-step", "64k", "--tokens", "300B", "--methods", "diloco")
    fixed = planned(capsys, *PLAN, *prices, *run)
    found = planned(capsys, *PLAN, *prices, *run, "--elastic")
    (row,), (before,), workers = found["methods"], fixed["methods"], found["workers"]
    assert row["meeting_puts_per_round"] == workers + 2
    assert row["meeting_gets_per_round"] == 2 * (workers - 1)
    meeting = ((workers + 2) * 4.5 + 2 * (workers - 1) * 0.36) / 1e6
    assert row["cost_per_round"] == pytest.approx(before["cost_per_round"] + meeting, rel=1e-12)
    rounds = row["steps"] / row["sync_every_steps"]
    assert row["cost"] == pytest.approx(before["cost"] + (rounds + 1) * meeting, rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--put-price", "5USD"), "--put-price and without --egress-price"),
        (("--elastic",), "--elastic and without --egress-price"),
        (("--egress-price", "-1USD"), "a price cannot be negative"),
        (("--egress-price", "cheap"), "it is not a number with a currency"),
        (("--egress-price", "0.09"), "it has no currency"),
        (("--egress-price", "$1EUR"), "it has two currencies"),
        (("--worker-price", "infUSD"), "it is not a number with a currency"),
        (("--worker-price", "1USD", "--traffic-price", "1EUR"), "in different currencies"),
        (("--egress-price", "1EUR"), "without --put-price and --get-price"),
        (("--egress-price", "1USD", "--topology", "ring"), "--egress-price and --topology ring"),
    ],
)
def test_prices_that_cannot_be_are_refused(capsys, flags, said: str) -> None:
    assert main([*PLAN, *flags]) in (1, 2)
    assert said in capsys.readouterr().err


def test_what_sealing_adds_is_planned(capsys) -> None:
    methods = ("--methods", "streaming_diloco")
    plain, sealed = (planned(capsys, *PLAN, *methods, *more) for more in ((), ("--sealed",)))
    (row,), (longer,) = plain["methods"], sealed["methods"]
    added = longer["sent_bytes_per_round"] - row["sent_bytes_per_round"]
    assert added == 28 * row["fragments"] > 28
    assert (plain["added_bytes_per_message"], sealed["added_bytes_per_message"]) == (0, 28)


FIELDS = {
    "": "format model workers added_bytes_per_message step_s link tokens_per_step_per_worker "
    "tokens target_utilisation methods run advice",
    "model": "name parameters layers",
    "link": "topology up_bits_per_s down_bits_per_s latency_s",
    "methods": "method sync_every_steps tau_steps fragments exchanges sent_bytes_per_round "
    "received_bytes_per_round puts_per_round gets_per_round meeting_puts_per_round "
    "meeting_gets_per_round cost_per_round cost_per_day cost sent_bytes_per_day "
    "received_bytes_per_day peak_sent_bytes_per_step peak_sent_bits_per_s utilisation limit fits "
    "step_s target_bits_per_s required_bits_per_s tokens_per_day steps wall_s sent_bytes "
    "received_bytes error",
    "required_bits_per_s": "0.5 0.8 0.9 0.95 0.99",
    "advice": "target_utilisation recommended closest changes loss_source currency",
    "recommended": "method python forecast loss_share bill",
    "bill": "is_of_run hours worker_hours waiting_hours traffic_bytes cost waiting_cost",
}


def test_the_fields_of_the_json_are_frozen(capsys) -> None:
    """Others read them: a new one is fine, a lost or a changed one is a new format."""
    found = planned(capsys, *PLAN, "--tokens-per-step", "64k", "--tokens", "300B")
    assert found["format"] == 2
    first, ddp = found["advice"]["recommended"][0], found["methods"][0]
    assert first["forecast"].keys() == ddp.keys()
    # of ddp, which waits 50 ms after every step of 800
    assert ddp["required_bits_per_s"]["0.95"] is None
    for name, fields in FIELDS.items():
        value = {"": found, **found, **found["advice"], **ddp, **first}[name]
        assert {*fields.split()} == {*(value[0] if isinstance(value, list) else value)}, name
    types = {
        "sent_bytes": int,
        "utilisation": float,
        "limit": str,
        "fits": bool,
        "cost": type(None),
    }
    assert {name: type(ddp[name]) for name in types} == types
    assert [row["method"] for row in found["methods"]] == list(presets.names())
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    assert {*names_in(found)} - {*re.findall(r"[`\"]([\w.]+)[`\"]", page)} == set()


def names_in(value: dict | list) -> Iterator[str]:
    """Of all fields, however deep."""
    if isinstance(value, dict):
        yield from value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from names_in(each)


def test_bytes_are_those_of_the_method(capsys) -> None:
    rows = planned(capsys, *PLAN)["methods"]
    shape = Shape.of_size(10**10, 48)
    for row in rows:
        sent = traffic(presets.from_text(row["method"]), shape, workers=2)
        assert row["sent_bytes_per_round"] == sent.sent_per_round


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
    assert found["link"] == {
        "topology": "star",
        "up_bits_per_s": 1e8,
        "down_bits_per_s": 8e9,
        "latency_s": 0.0,
    }
    assert found["target_utilisation"] == 0.5
    assert [row["sync_every_steps"] for row in found["methods"]] == [1, 7]
    assert [row["steps"] for row in found["methods"]] == [5209, 5209]


def test_coding_takes_time_if_one_says_how_much(capsys) -> None:
    def row(*flags: str) -> dict:
        return planned(capsys, *PLAN, "--methods", "diloco", *flags)["methods"][0]

    free, coded = row(), row("--encode-time", "7ns", "--decode-time", "2ns")
    # A round more of encoding 10B numbers, and of decoding those of two workers.
    more_s = 30 * 0.8 / coded["utilisation"] - 30 * 0.8 / free["utilisation"]
    assert more_s == pytest.approx(70 + 2 * 20, rel=1e-9)
    assert coded["limit"] == "coding"


@pytest.mark.parametrize("columns", [80, 200])
def test_tables_say_it_in_words(capsys, monkeypatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*PLAN, "--tokens-per-step", "64k", "--tokens", "300B"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "10B in 48 layers on 2 workers in a ring, 800 ms a step; 10 Gbit/s up and down, 50 ms one"
    )
    lines = {line.split()[0]: line for line in printed.splitlines()[::-1] if line.split()}
    assert lines["diloco"].split()[-2:] == ["bandwidth", "no"]
    assert "42.8 %" in lines["diloco"]
    assert lines["streaming_diloco"].split()[-2:] == ["compute", "yes"]
    assert "wall-clock" in printed
    assert "…" not in printed
    assert "what to run: busy 90 %" in printed
    assert "\n   method = tw.presets.streaming_muloco(" in printed
    assert printed.rstrip().endswith("compare at your own size.")


def test_methods_that_were_asked_for_are_judged_and_nothing_else_is_advised(capsys) -> None:
    assert main([*PLAN, "--methods", "diloco,streaming_diloco"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("busy 90 % of the time with streaming_diloco.")
    assert main([*PLAN, "--methods", "diloco"]) == 0
    printed = capsys.readouterr().out
    assert "No method keeps the workers busy 90 % of the time on this link." in printed
    assert "what to run" in printed


def test_advice_comes_with_a_bill(capsys) -> None:
    prices = ("--worker-price", "2.5EUR", "--traffic-price", "0.1EUR")
    found = planned(capsys, *PLAN, *prices)["advice"]
    assert found["currency"] == "EUR"
    first = found["recommended"][0]["bill"]
    assert (first["is_of_run"], first["worker_hours"]) == (False, 48)
    traffic = first["traffic_bytes"] / 1e9 * 0.1
    assert first["cost"] == pytest.approx(48 * 2.5 + traffic)
    assert main([*PLAN, *prices]) == 0
    printed = capsys.readouterr().out
    assert "day, EUR" in printed
    assert "A day: 48 worker-hours" in printed


def test_a_method_that_does_not_fit_is_a_line_among_others(capsys) -> None:
    assert main([*PLAN, "--sync-every", "1", "--methods", "diloco,streaming_diloco"]) == 0
    assert "\nstreaming_diloco: cannot " in capsys.readouterr().out
    found = planned(capsys, *PLAN, "--sync-every", "1", "--methods", "diloco,streaming_diloco")
    good, bad = found["methods"]
    assert good.keys() == bad.keys()
    assert bad["error"].startswith("cannot ")
    assert (bad["fits"], bad["utilisation"]) == (False, None)


BAD = [
    (["--bandwidth", "0"], "no unit"),
    (["--bandwidth", "0Gbit/s"], "nothing would ever arrive"),
    (["--bandwidth", "-1Gbit/s"], "--bandwidth '-1Gbit/s'"),
    (["--bandwidth", "10Gb"], "did you mean"),
    (["--bandwidth", "inf bit/s"], "finite number"),
    (["--bandwidth", "1e-300bit/s"], "so slow a link"),
    (["--latency", "50"], "--latency '50'"),
    (["--latency", "-1ms"], "cannot be negative"),
    (["--step-time", "0s"], "--step-time '0s'"),
    (["--step-time", "1 fortnight"], "fortnight"),
    (["--workers", "0"], "--workers '0'"),
    (["--workers", "two"], "--workers 'two'"),
    (["--parameters", "10Q"], "--parameters '10Q'"),
    (["--parameters", "7"], "7 parameters in 48 layers"),
    (["--layers", "1.5"], "whole number"),
    (["--sync-every", "0"], "--sync-every '0'"),
    (["--target", "100%"], "between 0 and 1"),
    (["--target", "90"], "--target '90'"),
    (["--methods", "dilocco"], "did you mean 'diloco'"),
    (["--methods", ","], "method ''"),
    (["--methods", "muloco:bits=3"], "bits"),
    (["--methods", "streaming_diloco", "--sync-every", "1"], "1 step"),
    (["--model", "150m"], "both --model and --parameters"),
    (["--accelerator", "H100"], "both --step-time and --accelerator"),
    (["--mfu", "0.4"], "both --step-time and --mfu"),
    (["--accelerators-per-worker", "8"], "--accelerators-per-worker"),
    (["--up", "1Gbit/s"], "both --bandwidth and --up"),
    (["--down", "1Gbit/s"], "both --bandwidth and --down"),
    (["--tokens", "1B"], "without --tokens-per-step"),
]


@pytest.mark.parametrize(("more", "message"), BAD)
def test_bad_input_is_one_clear_line(tmp_path, monkeypatch, capsys, more, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    refuses(capsys, [*PLAN, *more], message)


WITHOUT = [
    ("--parameters", "--parameters or --model"),
    ("--layers", "without --layers"),
    ("--workers", "without --workers"),
    ("--step-time", "--step-time or --accelerator"),
    ("--bandwidth", "--bandwidth or --up or --down"),
]


@pytest.mark.parametrize(("flag", "message"), WITHOUT)
def test_what_is_missing_is_one_clear_line(capsys, flag: str, message: str) -> None:
    at = PLAN.index(flag)
    refuses(capsys, PLAN[:at] + PLAN[at + 2 :], message)


JOB = ["plan", "--workers", "2", "--latency", "1ms"]
FAST = ["--step-time", "1s", "--bandwidth", "1Gbit/s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*FAST, "--model", "org/no-such-model"], "not in the local Hugging Face cache"),
        ([*FAST, "--model", "missing.json"], "no file or folder"),
        ([*FAST, "--model", "250q"], "did you mean"),
        ([*FAST, "--model", "broken.json"], "transformers says"),
        ([*FAST, "--model", "250k", "--layers", "4"], "both --model and --layers"),
        ([*MODEL, "--step-time", "1s", "--up", "1Gbit/s"], "--up and without --down"),
        ([*MODEL, "--step-time", "1s", "--down", "1Gbit/s"], "--down and without --up"),
        ([*MODEL, *FAST[2:], "--accelerator", "H100"], "without --tokens-per-step"),
        (
            [*MODEL, *FAST[2:], "--accelerator", "H1000", "--tokens-per-step", "64k"],
            "did you mean 'H100'",
        ),
        (
            [*MODEL, *FAST[2:], "--accelerator", "H100", "--tokens-per-step", "1k", "--mfu", "2"],
            "--mfu '2'",
        ),
    ],
)
def test_other_bad_input_is_one_clear_line(
    tmp_path, monkeypatch, capsys, arguments, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    refuses(capsys, [*JOB, *arguments], message)


def refuses(capsys, arguments: list[str], message: str) -> None:
    assert main(arguments) in (1, 2)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: cannot ")
    assert message in said.err
    assert "because" in said.err
    assert "do:" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.slow
def test_a_plan_starts_without_what_is_slow() -> None:
    code = (
        "import sys; from thinwire.cli import main; "
        f"assert main({PLAN!r}) == 0; print(' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {
        "transformers",
        "datasets",
        "tokenizers",
        "torch.distributed.fsdp",
    }


@pytest.mark.parametrize(
    ("parameters", "layers", "workers"),
    [("1e15", "1", "8"), ("1e14", "10", "8"), ("1T", "1k", "1k")],
)
def test_the_largest_plan_comes_to_an_end(
    parameters: str, layers: str, workers: str, capsys
) -> None:
    """It lays out nothing: by a look at every row it takes minutes, and then all memory."""
    flags = ["--parameters", parameters, "--layers", layers, "--workers", workers]
    link = ["--step-time", "1s", "--bandwidth", "1Gbit/s"]
    assert main(["plan", *flags, *link, "--json"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)["methods"]}
    assert set(rows) == set(presets.names())


# -- the same job over another link ---------------------------------------------------------------


def test_a_run_is_planned_over_another_link(capsys, simulated) -> None:
    out = simulated("diloco")
    summary = json.loads((out / "summary.json").read_text())
    link = ("--bandwidth", "1Mbit/s", "--latency", "20ms")
    found = planned(capsys, "plan", "--from", str(out), *link, "--step-time", "0.1s")
    assert (found["workers"], found["step_s"], found["link"]["topology"]) == (2, 0.1, "ring")
    (row,) = found["methods"]
    assert (row["method"], row["sync_every_steps"], row["steps"]) == ("diloco", 5, 13)
    assert row["sent_bytes"] == summary["sent_bytes_per_worker"] == found["run"]["sent_nbytes"]
    assert row["received_bytes"] == summary["received_bytes_per_worker"]
    # 13 steps, and three exchanges of which each has its bits and two latencies.
    bits_s = 8 * row["sent_bytes"] / 1e6
    assert 1.3 + bits_s + 3 * 0.04 < row["wall_s"] < 1.3 + 1.1 * bits_s + 3 * 0.05
    assert found["run"]["steps"] == 13


def test_another_method_and_other_workers_are_planned_from_a_run(
    capsys,
    simulated,
) -> None:
    arguments = ("--from", str(simulated("diloco")), "--step-time", "0.1s", "--workers", "5")
    methods = ("--methods", "muloco:bits=2,ddp", "--bandwidth", "1Mbit/s", "--tokens", "1M")
    found = planned(capsys, "plan", *arguments, *methods)
    assert [row["method"] for row in found["methods"]] == ["muloco:bits=2", "ddp"]
    assert (found["workers"], found["tokens"]) == (5, 1_000_000)


@pytest.mark.parametrize(
    ("flags", "because"),
    [
        ((), "2 workers shared a process and its cores"),
        (("--model", "250k"), "both --from and --model"),
        (("--topology", "star", "--step-time", "1s"), "both --from and --topology"),
        (("--sealed", "--step-time", "1s"), "both --from and --sealed"),
        (("--egress-price", "1USD"), "both --from and --egress-price"),
        (("--accelerator", "h100"), "both --from and --accelerator"),
    ],
)
def test_what_a_run_says_already_is_refused(
    capsys,
    simulated,
    flags: tuple[str, ...],
    because: str,
) -> None:
    run = ("--from", str(simulated("diloco")), "--bandwidth", "1Mbit/s")
    assert main(["plan", *run, *flags]) == 1
    error = capsys.readouterr().err
    assert because in error
    assert error.startswith("error: cannot plan")
    assert error.count("\n") == 1


def test_the_run_is_shown_beside_the_plan(capsys, simulated) -> None:
    run = ("--from", str(simulated("diloco")), "--bandwidth", "1Mbit/s", "--step-time", "0.1s")
    assert main(["plan", *run]) == 0
    assert capsys.readouterr().out.startswith("the run: 13 steps of diloco in ")
