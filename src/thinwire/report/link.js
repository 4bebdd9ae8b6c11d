"use strict";
// The planner's simulation, `thinwire.plan.simulate`, to which tests hold it.
var thinwire = globalThis.thinwire ?? {};

// link: {rate (bit/s), latency (s), step (s), topology}. Returns seconds:
// at[t]: when step t is done and what is due then is applied; wall: at the end of the run;
// waits, transfers: intervals.
thinwire.simulate = ({ steps, every, tau, messages }, link) => {
  const costs = messages.map(({ crossing }) => {
    const [moved, hops, last] = crossing[link.topology];
    const lag = last * link.latency;
    return { held: (8 * moved) / link.rate + (hops * link.latency - lag), lag };
  });
  let [now, free] = [0, 0];
  const at = new Float64Array(steps + 1);
  const [waits, transfers] = [[], []];
  const needed = new Map();
  const use = (flights = []) => {
    for (const { done } of flights) {
      if (done <= now) continue;
      waits.push({ from: now, to: done });
      now = done;
    }
  };
  const useNeeded = (step) => (use(needed.get(step)), needed.delete(step));
  const send = (index, step) => {
    const begun = Math.max(now, free);
    free = begun + costs[index].held;
    if (free > begun) transfers.push({ from: begun, to: free });
    const when = step + 1 + tau;
    needed.set(when, [...(needed.get(when) ?? []), { index, done: free + costs[index].lag }]);
  };
  for (let step = 1; step <= steps; step += 1) {
    useNeeded(step);
    at[step - 1] = now;
    now += link.step;
    messages.forEach(({ first, offset }, index) => {
      if (step >= first && (step - offset) % every === 0) send(index, step);
    });
  }
  useNeeded(steps + 1);
  at[steps] = now;
  // What is left of the last round is sent at the end.
  const lastDue = ({ first, offset }) => {
    const begins = first + ((((offset - first) % every) + every) % every);
    return steps >= begins ? steps - ((steps - begins) % every) : 0;
  };
  const leftOver = messages.flatMap((message, index) => (lastDue(message) < steps ? [index] : []));
  const inOrder = () => [...needed.keys()].sort((one, other) => one - other);
  if (tau < every) {
    for (const step of inOrder()) {
      const flights = needed.get(step);
      use(flights.filter(({ index }) => leftOver.includes(index)));
      needed.set(step, flights.filter(({ index }) => !leftOver.includes(index)));
    }
  }
  leftOver.forEach((index) => send(index, steps));
  inOrder().forEach(useNeeded);
  return { at, wall: now, waits, transfers };
};

// Seconds of a run by what they went to; hidden: computing while the link was busy.
thinwire.shares = ({ wall, waits, transfers }) => {
  const sum = (intervals) => intervals.reduce((total, { from, to }) => total + (to - from), 0);
  let [overlap, at] = [0, 0];
  for (const wait of waits) {
    while (at < transfers.length && transfers[at].to <= wait.from) at += 1;
    for (let i = at; i < transfers.length && transfers[i].from < wait.to; i += 1) {
      overlap += Math.max(0, Math.min(transfers[i].to, wait.to) - Math.max(transfers[i].from, wait.from));
    }
  }
  const [waiting, busy] = [waits, transfers].map(sum);
  return { computing: wall - waiting, waiting, hidden: Math.max(0, busy - overlap) };
};
