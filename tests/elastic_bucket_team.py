"""Workers as real processes that come and go, and share an object store and nothing else."""

from pathlib import Path
from typing import Any

from elastic_team import Team
from s3_server import Proxy, options_of


class BucketTeam(Team):
    """Workers, all of them processes; in place of the lighthouse there is the way to the store."""

    def __init__(self, tmp_path: Path, *, url: str, endpoint: str | None = None, **options: Any):
        self.url, self.is_cut = url, False
        self.proxy = None if endpoint is None else Proxy(endpoint, self.fault)
        environment = options.pop("environment", {})
        if self.proxy is not None:
            environment["AWS_ENDPOINT_URL"] = self.proxy.endpoint
            for key in ("region", "access_key_id", "secret_access_key"):
                environment[f"AWS_{key.upper()}"] = options_of(self.proxy.endpoint)[key]
        super().__init__(tmp_path, environment=environment, **options)
        self.address = url

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        if self.proxy is not None:
            self.proxy.close()

    def fault(self, number: int, line: str) -> str:
        """What happens to a request; tests may set another one."""
        return "cut" if self.is_cut else ""

    def start_lighthouse(self) -> None:
        """Let the workers reach the store."""
        self.is_cut = False

    def kill_lighthouse(self) -> None:
        """Let none of them reach it."""
        assert self.proxy is not None
        self.is_cut = True
