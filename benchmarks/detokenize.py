"""Host cost of turning tokens into output: detokenise, match stop strings, append to the output.

Prints the median microseconds of processor time per token at 100 and at 8,000 tokens; the two
agree, as the cost of a token does not depend on how many came before it. Goal: 2 us.

    python benchmarks/detokenize.py [--tokenizer DIR] [--stop STRING] [--repeats N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tvr.core.detokenizer import IncrementalDetokenizer
from tvr.core.outputs import CompletionOutput
from tvr.core.stop import StopMatcher
from tvr.core.tokenizer import Tokenizer

TEXT = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps. Größe und Straße, déjà vu; "
    "东京 and 北京 are cities.\n\n1. A smile 😀 helps.\n2. It is 12:30, said the user: go home!\n"
)


def sample_tokenizer() -> Tokenizer:
    """Return a byte-level BPE trained on `TEXT`, of the kind Llama 3 and SmolLM2 have."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    with tempfile.TemporaryDirectory() as path:
        backend.save(str(Path(path) / "tokenizer.json"))
        return Tokenizer.from_dir(path)


def us_per_token(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> float:
    """Return the microseconds of processor time a token takes for one answer of `ids`."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    matcher = StopMatcher(stops)
    output = CompletionOutput(index=0)
    begin = time.thread_time()
    for token_id in ids:
        text, stopped = matcher.push(detokenizer.push(token_id))
        output.append(token_id, text)
        if stopped is not None:
            raise SystemExit(f"the text has the stop string {stopped!r}; give another")
    return (time.thread_time() - begin) / len(ids) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Host cost per token of producing output text.")
    parser.add_argument("--tokenizer", metavar="DIR", help="checkpoint directory (default: own)")
    parser.add_argument("--stop", action="append", help="stop string (default: two of them)")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()

    tokenizer = Tokenizer.from_dir(options.tokenizer) if options.tokenizer else sample_tokenizer()
    text_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    ids = (text_ids * (8000 // len(text_ids) + 1))[:8000]
    cases = {"no stop string": [], "two stop strings": options.stop or ["</answer>", "\n\nUser:"]}
    for name, stops in cases.items():
        for num_tokens in (100, 8000):
            times = [
                us_per_token(tokenizer, ids[:num_tokens], stops) for _ in range(options.repeats)
            ]
            print(f"{name:16}  {num_tokens:5} tokens  {statistics.median(times):.2f} us per token")


if __name__ == "__main__":
    main()
