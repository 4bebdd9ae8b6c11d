"""Three lines added to a plain PyTorch loop.

Needs: pip install -e .

Alone: python FILE. Two workers: torchrun --nproc-per-node 2 FILE, or on two machines

THINWIRE_AT="tcp://node0:29400?workers=2&worker=0" python FILE    # worker=1 on the other machine
"""

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
torch.manual_seed(0)  # all workers start from the same weights
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
method = tw.presets.diloco(sync_every=10)  # added
outer = tw.OuterLoop(model, optimizer, method)  # added: connects to the other workers
worker = outer.transport.rank
data = torch.Generator().manual_seed(worker)  # every worker reads its own data
for _ in range(100):
    x = torch.randn(64, 8, generator=data)
    loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    outer.step()  # added: exchanges when an exchange is due
print(f"worker {worker}: loss {loss:.4f} {outer.stats} {outer.digest()}")
