"""`thinwire serve`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.flags import (
    At,
    Option,
    Switch,
    TrainFlags,
    default_out,
    optional_token,
    read_address,
    write_settings,
)
from thinwire.cli.output import closing_line, say

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class ServeCommand(TrainFlags):
    """Hold the parameters of an asynchronous run, whose workers do not wait for each other.

    - workers join with thinwire join --asynchronous and the same flags
    - the method's outer SGD becomes delayed Nesterov with the same rates
    - with the same --out, a server continues from its checkpoint

    $ thinwire serve s3://my-bucket/first --workers 4 --out runs/server
    """

    at: At = None
    """s3://BUCKET/RUN, hub://TOKEN@HOST:PORT/RUN, ...; default THINWIRE_AT."""
    equal_steps: Switch = False
    """Give slow workers as many inner steps as the fastest."""
    grace_s: float = 0.0
    """Seconds to wait for other arrivals after the first."""
    lost_after_s: float = 300.0
    """Seconds of silence after which a worker counts as lost."""
    token_file: Option[Path] = None
    """File with the run's token, which seals messages; default THINWIRE_TOKEN, or none."""

    def main(self, console: Console) -> None:
        """Run the command."""
        from thinwire.asynchronous import AsyncOptions
        from thinwire.asynchronous.objects import AsyncStoreServer
        from thinwire.train import asynchronous

        address = read_address(self.at)
        config = self.arrivals_config()
        out = self.out or default_out(f"async-{self.method}")
        if not (out / "config.json").exists():
            write_settings(out, self.settings(config))
        summary = asynchronous.serve(
            config,
            out,
            AsyncOptions(
                dynamic_steps=not self.equal_steps,
                grace_s=self.grace_s,
                lost_after_s=self.lost_after_s,
            ),
            partial(
                AsyncStoreServer,
                store=address.place,
                run=address.run,
                token=optional_token(self.token_file),
                log=partial(say, console),
            ),
        )
        say(console, closing_line(summary, out))
