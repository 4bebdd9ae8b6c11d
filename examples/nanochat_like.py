"""A script like nanochat's base_train as one of several workers.

Needs: pip install -e .

Alone: python FILE [--no-compile]. Two workers, in two terminals (each with its own
--checkpoint-dir), or on two machines with the address of the first:

THINWIRE_AT="tcp://127.0.0.1:29400?workers=2&worker=0" python FILE
THINWIRE_AT="tcp://127.0.0.1:29400?workers=2&worker=1" python FILE

Differs from nanochat: its MuonAdamW averages gradients over all ranks of the default process group
inside step(). thinwire's Muon averages nothing.
"""

import argparse
import inspect
import tempfile
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import thinwire as tw

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--depth", type=int, default=2)
parser.add_argument("--iterations", type=int, default=30)
parser.add_argument("--accumulation", type=int, default=2, help="micro-batches in a step")
parser.add_argument("--save-every", type=int, default=15)
parser.add_argument("--eval-every", type=int, default=10)
parser.add_argument("--resume-from-step", type=int, default=-1)
parser.add_argument("--checkpoint-dir", type=Path)
parser.add_argument("--no-compile", dest="compile", action="store_false")
args = parser.parse_args()

transport = tw.connect()  # thinwire: the other workers
worker = transport.rank
folder = (args.checkpoint_dir or Path(tempfile.mkdtemp())) / f"worker{worker}"
device = "cuda" if torch.cuda.is_available() else "cpu"
width, heads, block, batch_size = 32 * args.depth, args.depth, 32, 8
text = torch.frombuffer(bytearray(inspect.getsource(textwrap).encode()), dtype=torch.uint8).long()


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.size(-1),))  # without weights of its own


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        split = self.qkv(norm(x)).view(rows, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = norm(split[0]), norm(split[1]), split[2]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(norm(x))).square())


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block() for _ in range(args.depth))
        self.lm_head = nn.Linear(width, 256, bias=False)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for layer in self.blocks:
            nn.init.zeros_(layer.proj.weight)
            nn.init.zeros_(layer.down.weight)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = norm(self.wte(x) + self.wpe.weight[: x.size(1)])
        for layer in self.blocks:
            h = layer(h)
        logits = 15 * torch.tanh(self.lm_head(norm(h)).float() / 15)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def read(rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - block - 1, (batch_size,), generator=rng)
    windows = torch.stack([text[s : s + block + 1] for s in starts]).to(device)
    return windows[:, :-1], windows[:, 1:]


def rate(step: int) -> float:
    """Of the initial learning rate: warm-up, then level, then down in a straight line."""
    up, down = (step + 1) / 4, (args.iterations - step) / (0.65 * args.iterations)
    return max(0.05, min(1.0, up, down))


torch.manual_seed(0)  # the same initial weights everywhere
with torch.device("meta"):
    model = GPT()
model.to_empty(device=device)
model.init_weights()
resuming = args.resume_from_step != -1
saved = None
if resuming:
    file = folder / f"step{args.resume_from_step}.pt"
    saved = torch.load(file, map_location=device)
    model.load_state_dict(saved["model"], assign=True)  # before the optimizer and the loop

method = tw.presets.muloco(sync_every=10, inner=tw.inner.Muon(lr=0.02, adamw_lr=0.01))
optimizer = method.inner.build(model)  # Muon for the matrices, AdamW for the rest
for group in optimizer.param_groups:
    group["initial_lr"] = group["lr"]
step, rng = 0, torch.Generator().manual_seed(worker)
if saved is not None:
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    rng.set_state(saved["rng"].cpu())
outer = tw.OuterLoop(  # thinwire; in the middle of a round weights differ from worker to worker
    model, optimizer, method, transport=transport, resume=saved and saved["outer"]
)
compiled = torch.compile(model, dynamic=False) if args.compile else model
autocast = torch.autocast(device, torch.bfloat16)

while True:
    is_last = step == args.iterations
    if is_last:
        outer.flush()  # thinwire: exchanges the last steps
    if is_last or step % args.eval_every == 0:
        with outer.evaluating(), torch.no_grad(), autocast:  # thinwire: the outer parameters
            validation = model(*read(torch.Generator().manual_seed(99))).item()
    if is_last or (step % args.save_every == 0 and step not in (0, args.resume_from_step)):
        folder.mkdir(parents=True, exist_ok=True)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        states |= {"outer": outer.state_dict(), "step": step, "rng": rng.get_state()}  # thinwire
        torch.save(states, folder / f"step{step}.pt")
        print(f"worker {worker}: saved step {step}", flush=True)
    if is_last:
        break
    for _ in range(args.accumulation):
        with autocast:
            loss = compiled(*read(rng)) / args.accumulation
        loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * rate(step)
        if group["rule"] == "muon":
            group["momentum"] = 0.85 + 0.1 * min(1.0, step / 300)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    outer.step()  # thinwire
    step += 1

print(f"worker {worker}: loss {validation:.4f} {outer.stats} {outer.digest()}")
