// One tab at a time: a user's store belongs to the tab that holds this lock. Another tab waits, and may ask for it.

export interface Place {
  /** Lets another tab have it. */
  release(): void;
}

/**
 * Resolves once this tab is the only one for `name`. waiting: called if another one is there, with a function that asks it to
 * give its place to this tab. yielded: called when another tab asks for ours; resolve once all is closed.
 */
export function alone(name: string, waiting: (ask: () => void) => void, yielded: () => Promise<void>): Promise<Place> {
  const channel = new BroadcastChannel(name);
  return new Promise((resolve, reject) => {
    const hold = (): Promise<void> =>
      new Promise((done) => {
        const release = (): void => {
          channel.close();
          done();
        };
        channel.onmessage = () => void yielded().finally(release);
        resolve({ release });
      });
    if (!("locks" in navigator)) {
      void hold(); // an old browser, or a page without TLS: nothing keeps a second tab away
      return;
    }
    const first = navigator.locks.request(name, { ifAvailable: true }, (lock) => {
      if (lock) return hold();
      waiting(() => channel.postMessage("yield"));
      void navigator.locks.request(name, hold).catch(reject);
      return undefined;
    });
    first.catch(reject);
  });
}
