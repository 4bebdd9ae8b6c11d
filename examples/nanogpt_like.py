"""A script like nanoGPT (compile, bf16, accumulation) as one of several workers.

Needs: pip install -e .

Alone: python FILE [FOLDER]. It continues from FOLDER/worker0.pt if it exists. Two workers, in two
terminals, or on two machines with the address of the first:

THINWIRE_AT="tcp://127.0.0.1:29400?workers=2&worker=0" python FILE FOLDER
THINWIRE_AT="tcp://127.0.0.1:29400?workers=2&worker=1" python FILE FOLDER
"""

import inspect
import math
import sys
import tempfile
import textwrap
from pathlib import Path

import torch
from torch import nn

import thinwire as tw

steps, accumulation, batch_size, block = 30, 2, 8, 32
device = "cuda" if torch.cuda.is_available() else "cpu"
text = torch.frombuffer(bytearray(inspect.getsource(textwrap).encode()), dtype=torch.uint8).long()
method = tw.presets.muloco(bits=2, sync_every=10, inner=tw.inner.Muon(lr=0.02, adamw_lr=0.005))
transport = tw.connect()  # thinwire: the other workers
worker = transport.rank
checkpoint = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / f"worker{worker}.pt"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.mix(self.norm(x)).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.out(attended)
        return x + self.mlp(x)


def read(rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - block - 1, (batch_size,), generator=rng)
    windows = torch.stack([text[s : s + block + 1] for s in starts]).to(device)
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast(device, torch.bfloat16):
        return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


torch.manual_seed(0)  # the same initial weights everywhere
model = nn.Sequential(nn.Embedding(256, 64), Block(64), Block(64), nn.Linear(64, 256)).to(device)
optimizer = method.inner.build(model)
rates = [group["lr"] for group in optimizer.param_groups]
first, saved, rng = 0, None, torch.Generator().manual_seed(worker)
if checkpoint.exists():
    loaded = torch.load(checkpoint, map_location=device)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    first, saved = loaded["step"], loaded["outer"]
    rng.set_state(loaded["rng"].cpu())
outer = tw.OuterLoop(model, optimizer, method, transport=transport, resume=saved)  # thinwire
compiled = torch.compile(model) if device == "cuda" else model

for step in range(first, steps):
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
    for _ in range(accumulation):
        (loss_of(compiled, *read(rng)) / accumulation).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    outer.step()  # thinwire
    if (step + 1) % 15 == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        states |= {"outer": outer.state_dict(), "step": step + 1, "rng": rng.get_state()}
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(states, checkpoint)
outer.flush()  # thinwire

with outer.evaluating(), torch.no_grad():
    validation = loss_of(model, *read(torch.Generator().manual_seed(99)))
print(f"worker {worker}: loss {validation:.4f} {outer.stats} {outer.digest()}")
