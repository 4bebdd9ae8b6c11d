"use strict";
// The planner's simulation, `thinwire.plan.simulate`, to which tests hold it.
var thinwire = globalThis.thinwire ?? {};

// link: {rate (bit/s), latency (s), step (s), topology}. Returns seconds:
// at[t]: when step t is done and what is due then is applied; wall: at the end of the run;
// waits, transfers: intervals with the step after which they come.
thinwire.simulate = (replay, link) => {
  const { steps, every, tau, messages } = replay;
  const costs = messages.map(({ crossing }) => {
    const [moved, hops, last] = crossing[link.topology];
    const lag = last * link.latency;
    return { held: (8 * moved) / link.rate + (hops * link.latency - lag), lag };
  });
  const due = (step) => {
    const found = [];
    messages.forEach(({ first, offset }, index) => {
      if (step >= first && (step - offset) % every === 0) found.push(index);
    });
    return found;
  };
  const lastFirst = Math.max(...messages.map(({ first }) => first));
  const cycle = new Map();
  const dueAfter = (step) => {
    if (step < lastFirst) return due(step);
    const place = step % every;
    if (!cycle.has(place)) cycle.set(place, due(step));
    return cycle.get(place);
  };

  let now = 0;
  let free = 0;
  const at = new Float64Array(steps + 1);
  const [waits, transfers] = [[], []];
  let needed = new Map();
  const use = (flights, step) => {
    for (const { done } of flights) {
      if (done > now) {
        waits.push({ from: now, to: done, step });
        now = done;
      }
    }
  };
  const send = (index, step) => {
    const begun = Math.max(now, free);
    free = begun + costs[index].held;
    if (free > begun) transfers.push({ from: begun, to: free, step, message: index });
    const when = step + 1 + tau;
    if (!needed.has(when)) needed.set(when, []);
    needed.get(when).push({ index, done: free + costs[index].lag });
  };
  const useNeeded = (step, before) => {
    use(needed.get(step) ?? [], before);
    needed.delete(step);
  };

  for (let step = 1; step <= steps; step += 1) {
    useNeeded(step, step - 1);
    at[step - 1] = now;
    now += link.step;
    for (const index of dueAfter(step)) send(index, step);
  }
  useNeeded(steps + 1, steps);
  at[steps] = now;

  const lastDue = ({ first, offset }) => {
    const begins = first + ((((offset - first) % every) + every) % every);
    return steps >= begins ? steps - ((steps - begins) % every) : 0;
  };
  const leftOver = messages.flatMap((message, index) => (lastDue(message) < steps ? [index] : []));
  const inOrder = () => [...needed.keys()].sort((one, other) => one - other);
  if (tau < every) {
    for (const step of inOrder()) {
      const flights = needed.get(step);
      use(flights.filter(({ index }) => leftOver.includes(index)), steps);
      needed.set(step, flights.filter(({ index }) => !leftOver.includes(index)));
    }
  }
  for (const index of leftOver) send(index, steps);
  for (const step of inOrder()) useNeeded(step, steps);
  return { at, wall: now, waits, transfers };
};

// Seconds of a run by what they went to; hidden: computing while the link was busy.
thinwire.shares = (run) => {
  const sum = (intervals) => intervals.reduce((total, { from, to }) => total + (to - from), 0);
  let overlap = 0;
  let at = 0;
  for (const wait of run.waits) {
    while (at < run.transfers.length && run.transfers[at].to <= wait.from) at += 1;
    for (let i = at; i < run.transfers.length && run.transfers[i].from < wait.to; i += 1) {
      const { from, to } = run.transfers[i];
      overlap += Math.max(0, Math.min(to, wait.to) - Math.max(from, wait.from));
    }
  }
  const [waiting, busy] = [run.waits, run.transfers].map(sum);
  return { computing: run.wall - waiting, waiting, hidden: Math.max(0, busy - overlap) };
};
