"""Training on a text file from Python: prepare, train, evaluate, generate.

Run it: python examples/train_on_text.py FILE [FOLDER]     (FILE: any text of 100 kB or more; FOLDER: where results go)
"""

from __future__ import annotations

import sys
from pathlib import Path

import tangolm
from tangolm import data, evaluation, training


def main(text: Path, folder: Path, steps: int = 200) -> dict[str, float]:
    """Train TANGO and a Loop Transformer++ of equal size on the same bytes; return their test NLL in nats a byte."""
    if not (folder / "data" / "manifest.json").exists():
        data.prepare("text", text, folder / "data", context=128)
    tokenizer = data.get_tokenizer("bytes")
    result = {}
    for preset in ("tango-mini-d4", "loop-mini-d4"):
        config = training.run_config(preset, folder / "data", ["optimizer.peak_lr=3e-3"], steps=steps, batch_size=8)
        run = folder / preset
        training.train(config, run, resume=True)  # run this script again after an interruption: it goes on
        result[preset] = training.evaluate_run(run, "test")["nll"]
        model = tangolm.load_model(training.Run(run).best())
        prompt = tokenizer.encode("def ")
        [tokens] = evaluation.generate(model, [prompt], max_new_tokens=60, temperature=0.8, top_p=0.9)
        print(f"{preset}: test NLL {result[preset]:.3f} nats a byte; 'def ' goes on: {tokenizer.decode(tokens)!r}")
    return result


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "runs/text"))
