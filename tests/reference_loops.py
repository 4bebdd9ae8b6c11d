"""Each preset as the loop one would write on a whiteboard: slow and obvious.

Workers are a list, tensors are handled one by one, nothing is encoded. `build_model` makes the same
model every time, `build_optimizer` the inner optimizer of a model, `loss` takes (model, step,
worker), and only whole rounds of `sync_every` steps count. The first line of a loop unpacks `outer`
and `sparsity`. Loops return the outer parameters at the end, for each worker if they differ.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

_CHUNK = 4096


def reference_ddp(build_model, build_optimizer, loss, *, workers, steps):
    """Data parallelism: one model, the mean of the workers' gradients."""
    model = build_model()
    optimizer = build_optimizer(model)
    for step in range(steps):
        for worker in range(workers):
            (loss(model, step, worker) / workers).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def reference_diloco(build_model, build_optimizer, loss, *, workers, steps, sync_every, outer):
    """DiLoCo with Nesterov momentum, and MuLoCo: the optimizer is the only difference.

    Source: DiLoCo (arXiv 2311.08105), Algorithm 1.
    """
    eta, mu = outer
    replicas, optimizers = _workers(build_model, build_optimizer, workers)
    theta = [p.detach().clone() for p in replicas[0].parameters()]
    momentum = [torch.zeros_like(p) for p in theta]
    for step in range(steps):
        _inner_step(replicas, optimizers, loss, step)
        if (step + 1) % sync_every == 0:
            live = [list(replica.parameters()) for replica in replicas]
            for i, t in enumerate(theta):
                mean = torch.stack([t - ps[i].detach() for ps in live]).mean(0)
                momentum[i] = mu * momentum[i] + mean
                theta[i] = theta[i] - eta * (mean + mu * momentum[i])
            _restart(theta, replicas)
    return theta


def reference_async_diloco(
    build_model, build_optimizer, loss, *, speeds, total_steps, sync_every, outer
):
    """Asynchronous DiLoCo: delayed Nesterov and dynamic local updates, without a grace period.

    Source: Asynchronous Local-SGD (arXiv 2401.09135).
    """
    eps, beta, every, c = outer
    replicas, optimizers = _workers(build_model, build_optimizer, len(speeds))
    theta = [p.detach().clone() for p in replicas[0].parameters()]
    m, s = ([torch.zeros_like(p) for p in theta] for _ in range(2))
    taken, arrivals, left = [0] * len(speeds), 0, total_steps
    sent: dict[int, tuple[float, list[Tensor]]] = {}
    now, idle = 0.0, list(range(len(speeds)))
    while idle or sent:
        for w in idle:
            given = min(max(1, int(sync_every * (speeds[w] / max(speeds)))), left)
            left -= given
            if given == 0:
                continue
            _restart(theta, [replicas[w]])
            for step in range(taken[w], taken[w] + given):
                loss(replicas[w], step, w).backward()
                optimizers[w].step()
                optimizers[w].zero_grad()
            taken[w] += given
            moved = zip(theta, replicas[w].parameters(), strict=True)
            sent[w] = (now + given / speeds[w], [t - p.detach() for t, p in moved])
        now = min((at for at, _ in sent.values()), default=now)
        idle = sorted(w for w, (at, _) in sent.items() if at == now)
        for w in idle:
            _, g = sent.pop(w)
            arrivals += 1
            for i, arrived in enumerate(g):
                s[i], coming, direction = s[i] + arrived, c, arrived / every
                if arrivals % every == 0:
                    m[i], s[i] = beta * m[i] + s[i] / every, torch.zeros_like(s[i])
                    coming = 1 - c * every + c
                theta[i] = theta[i] - eps * (coming * beta * m[i] + direction)
    return theta


def reference_noloco(build_model, build_optimizer, loss, *, steps, sync_every, outer, groups):
    """NoLoCo with both vectors of the paper: mean pseudo-gradient, and pull to the mean anchor.

    Source: NoLoCo (arXiv 2506.10911), eq. 1 and 2, with the sign of the pseudo-gradient as in its
    proof and its code.
    """
    eta, mu, gamma = outer
    workers = sum(map(len, groups(1)))
    replicas, optimizers = _workers(build_model, build_optimizer, workers)
    phi = [[p.detach().clone() for p in replica.parameters()] for replica in replicas]
    momentum = [[torch.zeros_like(p) for p in anchor] for anchor in phi]
    for step in range(steps):
        _inner_step(replicas, optimizers, loss, step)
        if (step + 1) % sync_every == 0:
            theta = [[p.detach().clone() for p in replica.parameters()] for replica in replicas]
            before = [list(anchor) for anchor in phi]
            for group in groups((step + 1) // sync_every):
                for i in range(len(theta[0])):
                    moved = torch.stack([before[k][i] - theta[k][i] for k in group]).mean(0)
                    mean = torch.stack([before[k][i] for k in group]).mean(0)
                    for k in group:
                        pull = gamma * (before[k][i] - mean)
                        momentum[k][i] = mu * momentum[k][i] + eta * moved + pull
                        phi[k][i] = before[k][i] - momentum[k][i]
            for anchor, replica in zip(phi, replicas, strict=True):
                _restart(anchor, [replica])
    return phi


def _workers(build_model, build_optimizer, count):
    replicas = [build_model() for _ in range(count)]
    return replicas, [build_optimizer(replica) for replica in replicas]


def _inner_step(replicas, optimizers, loss, step):
    for worker, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
        loss(replica, step, worker).backward()
        optimizer.step()
        optimizer.zero_grad()


def reference_sparseloco(
    build_model, build_optimizer, loss, *, workers, steps, sync_every, sparsity, over_senders=True
):
    """SparseLoCo with outer learning rate 1 and values in full precision; sparse MuLoCo with Muon.

    Only for models whose tensors all have fewer than 4096 elements: then chunks are runs of 4096 in
    the concatenated parameters.

    Source: SparseLoCo (arXiv 2508.15706), Algorithm 1; its released code for the mean over senders.
    """
    k, beta = sparsity
    replicas, optimizers = _workers(build_model, build_optimizer, workers)
    theta = _flat(replicas[0])
    residuals = [torch.zeros_like(theta) for _ in replicas]
    for step in range(steps):
        _inner_step(replicas, optimizers, loss, step)
        if (step + 1) % sync_every == 0:
            sent: list[Tensor] = []
            for worker, replica in enumerate(replicas):
                wanted = beta * residuals[worker] + (theta - _flat(replica))
                sent.append(torch.cat([_top(chunk, k) for chunk in wanted.split(_CHUNK)]))
                residuals[worker] = wanted - sent[worker]
            together = torch.stack(sent)
            senders = (together != 0).sum(0).clamp(min=1) if over_senders else workers
            theta = theta - together.sum(0) / senders
            for replica in replicas:
                nn.utils.vector_to_parameters(theta.clone(), replica.parameters())
    return [theta]


def _workers(build_model, build_optimizer, count):
    replicas = [build_model() for _ in range(count)]
    return replicas, [build_optimizer(replica) for replica in replicas]


def _inner_step(replicas, optimizers, loss, step):
    for worker, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
        loss(replica, step, worker).backward()
        optimizer.step()
        optimizer.zero_grad()


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _top(chunk: Tensor, k: int) -> Tensor:
    """`chunk` with all but its largest numbers zeroed: keeps k of 4096, at least one."""
    return _top_of(chunk, max(1, int(k * len(chunk) / _CHUNK + 0.5)))


def _top_of(numbers: Tensor, k: int) -> Tensor:
    return torch.where(_largest(numbers, k), numbers, 0.0)


def _largest(numbers: Tensor, k: int) -> Tensor:
    """A mask of the k largest magnitudes; ties go to the first."""
    flat = numbers.flatten()
    places = flat.abs().sort(descending=True, stable=True).indices[:k]
    return torch.zeros_like(flat, dtype=torch.bool).scatter(0, places, True).view_as(numbers)


@torch.no_grad()
def _restart(theta: Sequence[Tensor], replicas: Sequence[nn.Module]) -> None:
    for replica in replicas:
        for parameter, value in zip(replica.parameters(), theta, strict=True):
            parameter.copy_(value)


class ReleasedRound(NamedTuple):
    """A round of `reference_released_sparseloco`; each list has an entry for every matrix."""

    sent: list[list[Tensor]]  # for each worker, a mask of the numbers it sent
    update: list[Tensor]
    residuals: list[list[Tensor]]  # for each worker, its feedback after the round
    theta: list[Tensor]


def reference_released_sparseloco(theta, deltas, *, k, decay=0.95, quantised=False):
    """The outer step of SparseLoCo's released code on given displacements.

    For every matrix by itself: e = decay e + Delta; the k largest numbers of each 64x64 block are
    sent and subtracted from e; the update of a number is its mean over the workers that sent it, 0
    if none did; theta = theta - update. A sent zero counts as sent.

    Source: SparseLoCo's released code (arXiv 2508.15706), outer learning rate 1.
    """
    theta = list(theta)
    feedback = [[torch.zeros_like(t) for t in theta] for _ in deltas[0]]
    for moved in deltas:
        sent = [[torch.zeros_like(t, dtype=torch.bool) for t in theta] for _ in moved]
        update = [torch.zeros_like(t) for t in theta]
        for i, anchor in enumerate(theta):
            total, senders = torch.zeros_like(anchor), torch.zeros_like(anchor)
            for worker, delta in enumerate(moved):
                local = anchor - delta[i]
                wanted = decay * feedback[worker][i] + (anchor - local)
                sent[worker][i] = _largest_of_blocks(wanted, k)
                values = torch.where(sent[worker][i], wanted, 0.0)
                if quantised:
                    values[sent[worker][i]] = _in_two_bits(wanted[sent[worker][i]])
                feedback[worker][i] = wanted - values
                total += values
                senders += sent[worker][i]
            update[i] = torch.where(senders > 0, total / senders, 0.0)
        theta = [t - u for t, u in zip(theta, update, strict=True)]
        residuals = [list(of_worker) for of_worker in feedback]
        yield ReleasedRound(sent=sent, update=update, residuals=residuals, theta=theta)


def _largest_of_blocks(matrix: Tensor, k: int) -> Tensor:
    """A mask of the k largest magnitudes in each 64x64 block."""
    chosen = torch.zeros_like(matrix, dtype=torch.bool)
    for place in _blocks(matrix):
        chosen[place] = _largest(matrix[place], k)
    return chosen


def _in_two_bits(numbers: Tensor) -> Tensor:
    """Each number replaced by the mean of its bin; four bins of 6 sigma / 4 are around the mean."""
    mean = numbers.mean()
    centred = numbers - mean
    step = 6 * (centred.square().sum() / (len(numbers) - 1)).sqrt() / 4
    bins = (centred / step + 2).round().clamp(0, 3)
    rounded = torch.empty_like(numbers)
    for number in range(4):
        rounded[bins == number] = centred[bins == number].mean() + mean
    return rounded


def reference_demo(build_model, loss, *, workers, steps, sparsity, rate, rate_in_momentum=False):
    """DeMo without weight decay and with values in full precision, in fp64.

    Only for models of matrices whose sides are multiples of 64.

    Source: DeMo (arXiv 2411.19870), its released code.
    """
    (k, beta), model = sparsity, build_model()
    theta = list(model.parameters())
    momenta = [[torch.zeros_like(p, dtype=torch.float64) for p in theta] for _ in range(workers)]
    for step in range(steps):
        lr, sent = rate(step), [[torch.zeros_like(m) for m in own] for own in momenta]
        for worker, own in enumerate(momenta):
            loss(model, step, worker).backward()
            for i, p in enumerate(theta):
                assert p.grad is not None
                gradient = p.grad.double() * (lr if rate_in_momentum else 1.0)
                own[i] = beta * own[i] + gradient
                for block in _blocks(own[i]):
                    sent[worker][i][block] = _top_of(_cosines() @ own[i][block] @ _cosines().T, k)
                    own[i][block] -= _cosines().T @ sent[worker][i][block] @ _cosines()
                p.grad = None
        with torch.no_grad():
            for p, *coefficients in zip(theta, *sent, strict=True):
                stacked = torch.stack(coefficients)
                mean = stacked.sum(0) / (stacked != 0).sum(0).clamp(min=1)
                for block in _blocks(mean):
                    p[block] -= lr * (_cosines().T @ mean[block] @ _cosines()).sign().float()
    return [p.detach() for p in theta]


def reference_decoupled_momentum(
    build_model, build_optimizer, loss, *, workers, steps, sync_every, outer
):
    """Decoupled momentum with values in full precision; see `reference_demo` for the models.

    Source: the code released with arXiv 2510.03371.
    """
    k, eta, beta = outer
    replicas, optimizers = _workers(build_model, build_optimizer, workers)
    anchors = [[p.detach().double() for p in replica.parameters()] for replica in replicas]
    momenta = [[torch.zeros_like(p) for p in own] for own in anchors]
    for step in range(steps):
        _inner_step(replicas, optimizers, loss, step)
        if (step + 1) % sync_every == 0:
            for i in range(len(anchors[0])):
                live = [list(replica.parameters())[i].detach() for replica in replicas]
                deltas = [anchors[w][i] - live[w] for w in range(workers)]
                sent = torch.zeros(workers, *deltas[0].shape, dtype=torch.float64)
                for w in range(workers):
                    momenta[w][i] = beta * momenta[w][i] + deltas[w]
                    for block in _blocks(momenta[w][i]):
                        coefficients = _cosines() @ momenta[w][i][block] @ _cosines().T
                        sent[w][block] = _top_of(coefficients, k)
                mean = sent.sum(0) / (sent != 0).sum(0).clamp(min=1)
                for w in range(workers):
                    for block in _blocks(mean):
                        change = mean[block] - sent[w][block]
                        momenta[w][i][block] += _cosines().T @ change @ _cosines()
                    anchors[w][i] -= eta * (deltas[w] + beta * momenta[w][i])
            for replica, anchor in zip(replicas, anchors, strict=True):
                _restart(anchor, [replica])
    return [[p.float() for p in own] for own in anchors]


def _blocks(matrix: Tensor) -> list[tuple[slice, slice]]:
    starts = [range(0, size, 64) for size in matrix.shape]
    return [(slice(r, r + 64), slice(c, c + 64)) for r in starts[0] for c in starts[1]]


@cache
def _cosines() -> Tensor:
    """F^T of the paper: sqrt(2/64) cos(pi (2b + 1) i / 128), and row 0 over sqrt 2."""
    i, b = torch.arange(64.0, dtype=torch.float64)[:, None], torch.arange(64.0, dtype=torch.float64)
    cosines = (torch.pi * (2 * b + 1) * i / 128).cos() * (2 / 64) ** 0.5
    cosines[0] *= 0.5**0.5
    return cosines


def reference_streaming(
    build_model, build_optimizer, loss, *, workers, steps, schedule, fragments, eta
):
    """Streaming DiLoCo with outer SGD and full precision, as its algorithm stands.

    Source: Streaming DiLoCo (arXiv 2501.18512), Algorithm 2.
    """
    h, tau, alpha = schedule
    replicas, optimizers = _workers(build_model, build_optimizer, workers)
    live = [list(replica.parameters()) for replica in replicas]
    theta = [p.detach().clone() for p in live[0]]
    travelling: dict[int, Tensor] = {}
    for t in range(1, steps + 1):
        _inner_step(replicas, optimizers, loss, t - 1)
        with torch.no_grad():
            for offset, members in fragments:
                if t >= h and (t - offset) % h == 0:
                    for i in members:
                        deltas = [theta[i] - live[worker][i] for worker in range(workers)]
                        travelling[i] = torch.stack(deltas).mean(0)
                if t - tau >= h and (t - offset - tau) % h == 0:
                    for i in members:
                        theta[i] = theta[i] - eta * travelling.pop(i)
                        for worker in range(workers):
                            mixed = alpha * live[worker][i] + (1 - alpha) * theta[i]
                            live[worker][i].copy_(mixed)
    return theta
