"""Speed and memory, each beside a plain form of the same thing measured in the same run; correctness is checked first.

A benchmark is a file: `op` the gate averaging alone. It offers `run(options)`, `render(result)` and `shortfalls(result)`,
the last against bars that are constants of the file.
"""

from tangolm.bench.machine import Machine

__all__ = ["Machine"]
