"""Elastic workers under trainers over a hub: ranks are killed, and the hub with them."""

import pytest

from elastic_team import TOKEN, Team
from hub_process import hub

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "work",
    [
        "elastic_worker.work",
        "trainer_workers.elastic_hugging_face",
        "trainer_workers.elastic_lightning",
    ],
)
def test_a_killed_worker_comes_back_over_a_hub_that_is_killed(
    work: str, ranks: int, tmp_path
) -> None:
    options = {"out": str(tmp_path / "out"), "layers": 4, "steps": 60, "step_s": 0.05}
    with (
        hub(tmp_path, THINWIRE_TOKEN=TOKEN) as started,
        Team(tmp_path, hub=started, work=work, **options) as team,
    ):
        first, second = team.start_all("a", "b", ranks=ranks)
        second.ranks[-1].kill()
        team.until(lambda: all(rank.gone for rank in second.ranks))
        started.kill()
        back = team.start("b", ranks=ranks)
        started.start()
        assert team.finish(120) == [*first.ranks, *back.ranks]
        assert back.events("healed"), team.report()
        assert {rank.last("last_step") for rank in (*first.ranks, *back.ranks)} == {60}
        assert any("b" in event["who"] for event in first.events("arrived")), team.report()
