// Recognises an answer that repeats itself without end. Pure. Characters here; `windlass run` counts tokens (model/text/parse/loops.py).

const LONGEST_PERIOD = 400;
const LEAST_CHARACTERS = 300;
const LEAST_TIMES = 4;

/** The number of characters that the end of the text repeats often enough; 0: it does not. */
export function loopPeriod(text) {
  for (let period = 1; period <= LONGEST_PERIOD; period += 1) {
    const covered = Math.max(LEAST_CHARACTERS, LEAST_TIMES * period);
    if (covered > text.length) return 0;
    const tail = text.slice(-covered);
    if (tail.slice(period) === tail.slice(0, -period)) return period;
  }
  return 0;
}
