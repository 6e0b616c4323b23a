"""Speed and memory, each beside a plain form of the same thing measured in the same run; correctness is checked first.

A benchmark is a file: `op` the gate averaging alone. It offers `run(options)`, `render(result)` and `BARS`, which
`bars.judge` holds a result against.
"""

from tangolm.bench.machine import Machine

__all__ = ["Machine"]
